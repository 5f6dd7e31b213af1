"""Equations as MathML, converted when the book is built: no script, no request.

The browser draws them with STIX Two Math, cut down to the glyphs that the book uses.
"""

import io
from html import unescape
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from docutils import nodes
from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont
from math_core import LatexError, LatexToMathML
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)
converter = LatexToMathML(fancy_error=False)

FONT = "math.woff2"


def convert(latex: str, *, display: bool) -> str:
    """Return the MathML of an equation.

    Raises
    ------
    math_core.LatexError
        If it is not valid; the message starts with the offset of the fault.
    """
    # Named entities are HTML's, but not XML's: characters serve both.
    return unescape(converter.convert_with_local_state(latex, displaystyle=display)).replace(
        "<mo><</mo>", "<mo>&lt;</mo>"
    )


class MathToMathML(SphinxTransform):
    """Converts every equation while its page is read, when file and line are at hand."""

    default_priority = 900

    def apply(self, **kwargs: Any) -> None:  # noqa: ARG002
        """Convert, and note the characters that the font must have."""
        glyphs: set[str] = set()
        for kind in (nodes.math, nodes.math_block):
            for node in self.document.findall(kind):
                try:
                    node["mathml"] = convert(node.astext(), display=kind is nodes.math_block)
                except LatexError as error:
                    logger.error(
                        "equation does not convert: %s in %r",
                        error,
                        node.astext(),
                        location=node,
                        type="mathml",
                    )
                    node["mathml"] = ""
                glyphs.update(node["mathml"])
        _glyphs(self.env)[self.env.docname] = glyphs


def _glyphs(env: BuildEnvironment) -> dict[str, set[str]]:
    if not hasattr(env, "mathml_glyphs"):
        env.mathml_glyphs = {}  # type: ignore[attr-defined]
    return cast("dict[str, set[str]]", env.mathml_glyphs)  # type: ignore[attr-defined]


def _purge(app: Sphinx, env: BuildEnvironment, docname: str) -> None:  # noqa: ARG001
    _glyphs(env).pop(docname, None)


def _merge(
    app: Sphinx,  # noqa: ARG001
    env: BuildEnvironment,
    docnames: list[str],
    other: BuildEnvironment,
) -> None:
    _glyphs(env).update({name: _glyphs(other)[name] for name in docnames if name in _glyphs(other)})


def visit_inline(self: HTML5Translator, node: nodes.math) -> None:
    """Write an inline equation."""
    self.body.append(node["mathml"])
    raise nodes.SkipNode


def visit_display(self: HTML5Translator, node: nodes.math_block) -> None:
    """Write a displayed equation with its number."""
    self.body.append(self.starttag(node, "div", CLASS="math"))
    # A wide equation scrolls in a box of its own; the keyboard must reach it.
    self.body.append(f'<div class="math-scroll" tabindex="0">{node["mathml"]}</div>')
    if node["number"]:
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    self.body.append("</div>")
    raise nodes.SkipNode


def subset_font(text: set[str]) -> bytes:
    """Return STIX Two Math as WOFF2 with the glyphs that `text` needs.

    Parameters
    ----------
    text
        Characters of the MathML. Letters stand for their italic forms too: the browser sets a
        lone letter in italics.
    """
    wanted = {ord(c) for c in text} | set(range(0x20, 0x7F))
    italics = {0x1D434 + i: ord("A") + i for i in range(26)}
    italics |= {0x1D44E + i: ord("a") + i for i in range(26)} | {0x210E: ord("h")}
    italics |= {0x1D6E2 + i: 0x391 + i for i in range(25)}
    italics |= {0x1D6FC + i: 0x3B1 + i for i in range(25)}
    italics |= {0x1D716: 0x3F5, 0x1D717: 0x3D1, 0x1D719: 0x3D5}
    wanted |= {code for code, plain in italics.items() if plain in wanted}
    options = Options(layout_features=["*"], name_IDs=["*"], flavor="woff2", notdef_outline=True)
    source = files("ziamath").joinpath("fonts/STIXTwoMath-Regular.ttf")
    font = TTFont(io.BytesIO(source.read_bytes()), recalcTimestamp=False)
    subsetter = Subsetter(options)
    subsetter.populate(unicodes=wanted)
    subsetter.subset(font)
    font.flavor = "woff2"
    out = io.BytesIO()
    font.save(out)
    return out.getvalue()


def write_font(app: Sphinx, exception: Exception | None) -> None:
    """Put the font beside the style sheet that names it."""
    if exception or app.builder.format != "html":
        return
    target = Path(app.outdir, "_static", FONT)
    draft = target.with_suffix(".part")
    draft.write_bytes(subset_font(set().union(*_glyphs(app.env).values())))
    draft.replace(target)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer; ``html_math_renderer = "mathml"`` chooses it."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_display, None))
    app.add_transform(MathToMathML)
    app.connect("env-purge-doc", _purge)
    app.connect("env-merge-info", _merge)
    app.connect("build-finished", write_font)
    static = str(Path(__file__).with_name("mathml.css"))
    app.connect("builder-inited", lambda app: app.config.html_static_path.append(static))
    app.add_css_file("mathml.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True, "env_version": 1}
