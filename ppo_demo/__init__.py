"""PPO for RLHF, as formulas that run.

Each formula of the book is one public function here. The same function draws the labs,
trains the language model and is tested against independent values. The formula modules take
NumPy arrays and PyTorch tensors alike; importing them imports neither torch nor matplotlib.

Of all formulas:

- Arrays of half precision are computed with in float32, and the result is of their type.
- What stands where a mask is false is never read, in value or gradient. A mask is boolean, or
  exactly 0 and 1.
- NaN where a mask is true gives NaN, or an error that names the argument.
- Bad arguments raise a ValueError, or a TypeError for what is no number or array; the message names
  the argument, what is allowed, and what was given.
"""

__version__ = "0.1.0"
