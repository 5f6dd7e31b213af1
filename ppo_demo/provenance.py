"""Which sources made a result: a digest of files, so that a stored result can be told stale."""

import hashlib
from pathlib import Path

TRAINING = [
    "_arrays.py",
    "_checks.py",
    "advantages.py",
    "aggregation.py",
    "algorithms.py",
    "diagnostics.py",
    "divergences.py",
    "losses.py",
    "surrogates.py",
    "lm/bestofn.py",
    "lm/corpus.py",
    "lm/model.py",
    "lm/pretrain.py",
    "lm/rollout.py",
    "lm/step.py",
    "lm/trainer.py",
]
"""What the numbers of a training run depend on, in the package."""


def digest(root: Path, patterns: list[str]) -> str:
    """Return a digest of the names and contents of the files that match.

    Parameters
    ----------
    root : Path
        Folder that the patterns are relative to.
    patterns : list of str
        Globs; ``__pycache__`` is passed over.

    Returns
    -------
    str
        16 hexadecimal digits.

    Raises
    ------
    ValueError
        If a pattern matches no file: a misspelt one would guard nothing.
    """
    state = hashlib.sha256()
    for pattern in patterns:
        found = [p for p in root.glob(pattern) if p.is_file() and "__pycache__" not in p.parts]
        if not found:
            raise ValueError(f"patterns must match files below {root}, got {pattern!r}")
        for path in sorted(found):
            content = path.read_bytes()
            state.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
            state.update(content)
    return state.hexdigest()[:16]
