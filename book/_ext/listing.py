"""Prints a function of the package from its source, its docstring cut to the first paragraph."""

import ast
import textwrap
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def find(tree: ast.AST, names: list[str]) -> ast.FunctionDef | ast.ClassDef | None:
    """Return the function or class of these names, each within the one before."""
    for name in names:
        found = [
            node
            for node in ast.iter_child_nodes(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
        ]
        if not found:
            return None
        tree = found[0]
    return tree if isinstance(tree, ast.FunctionDef | ast.ClassDef) else None


def short(source: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return a definition's lines; of its docstring the first paragraph."""
    lines = source.splitlines()
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    text = ast.get_docstring(node)
    first = node.body[0]
    head, rest = lines[start - 1 : first.lineno - 1], lines[first.lineno - 1 : node.end_lineno]
    if text:
        indent = " " * first.col_offset
        paragraph = text.split("\n\n")[0].replace("\n", f"\n{indent}")
        rest = [f'{indent}"""{paragraph}"""', *lines[first.end_lineno or 0 : node.end_lineno]]
    return textwrap.dedent("\n".join([*head, *rest]))


class Listing(SphinxDirective):
    """`{listing} ppo_demo.losses.losses`: the function as it stands in the package."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the listing, or an error that names the page's line."""
        root = Path(self.env.srcdir, self.config.execution_root).resolve()
        parts = self.arguments[0].split(".")
        for end in range(len(parts) - 1, 0, -1):
            path = root.joinpath(*parts[:end]).with_suffix(".py")
            if not path.is_file():
                continue
            source = path.read_text(encoding="utf-8")
            node = find(ast.parse(source), parts[end:])
            if node is None:
                break
            self.env.note_dependency(str(path))
            code = short(source, node)
            block = nodes.literal_block(code, code, language="python")
            self.set_source_info(block)
            return [block]
        raise self.error(f"listing must be a function or class of the package, got {parts}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.add_directive("listing", Listing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
