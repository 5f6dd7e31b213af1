"""PPO for RLHF, as formulas that run.

Each formula of the book is one public function here. The same function draws the labs,
trains the language model and is tested against independent values. The formula modules take
NumPy arrays and PyTorch tensors alike; importing them imports neither torch nor matplotlib.
"""

__version__ = "0.1.0"
