"""Which code made a result: a digest of what it imports, so that what is stale can be told."""

import ast
import hashlib
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The folder that holds the package."""


@cache
def _imported(code: str) -> frozenset[str]:
    """Return what code imports, by full names; of `from a import b` both a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def modules(code: str, root: Path = ROOT) -> list[Path]:
    """Return the modules below a folder that code imports, directly or through one another.

    Parameters
    ----------
    code : str
        Python.
    root : Path
        The folder that packages are imported from; others are passed over.

    Returns
    -------
    list of Path
        Sorted; packages on the way to a module are among them.

    Raises
    ------
    SyntaxError
        If the code, or that of a module, cannot be parsed.
    """
    found: set[Path] = set()
    left = [code]
    while left:
        for name in _imported(left.pop()):
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                place = root.joinpath(*parts[:end])
                for path in (place / "__init__.py", place.with_name(place.name + ".py")):
                    if path not in found and path.is_file():
                        found.add(path)
                        left.append(path.read_text(encoding="utf-8"))
    return sorted(found)


def data(path: Path) -> list[Path]:
    """Return the files beside a module that it names: its data, scripts and style sheets."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    names = {text for text in texts if isinstance(text, str) and re.fullmatch(r"[\w-]+\.\w+", text)}
    return [path.parent / name for name in sorted(names) if (path.parent / name).is_file()]


def digest(paths: Iterable[Path], root: Path, content: Callable[[Path], bytes]) -> str:
    """Return a digest, 16 hexadecimal digits, of the names and contents of files."""
    state = hashlib.sha256()
    for path in sorted(paths):
        data = content(path)
        state.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode() + data)
    return state.hexdigest()[:16]


class _Silent(ast.NodeTransformer):
    """Removes texts that stand alone, docstrings above all: they do nothing."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Return None for a text, which removes it."""
        value = node.value
        return None if isinstance(value, ast.Constant) and isinstance(value.value, str) else node


def meaning(path: Path) -> bytes:
    """Return a module's syntax tree as text: without comments, docstrings and layout."""
    return ast.dump(_Silent().visit(ast.parse(path.read_text(encoding="utf-8")))).encode()


def study_digest(*parts: str, rows: Iterable[object], root: Path = ROOT) -> str:
    """Return the digest of what the numbers of training runs depend on.

    Parameters
    ----------
    *parts : str
        Modules of the package that the runs are made by; what these import counts too.
    rows : iterable
        The rows of the table of algorithms that the runs used. They count, the table does not:
        it may get new ones.
    root : Path
        The folder that holds the package.

    Returns
    -------
    str
        16 hexadecimal digits. An edit of comments and docstrings does not change it.
    """
    found = modules("\n".join(f"import {part}" for part in parts), root)
    table = root / "ppo_demo" / "algorithms.py"
    code = digest([path for path in found if path != table], root, meaning)
    text = "\n".join([code, *map(repr, rows)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
