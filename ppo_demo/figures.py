"""One look for all figures: matplotlib drawn to inline SVG that follows the page.

Text stays text, ink is the page's own text colour and every other colour is a CSS variable, so
a figure is readable on light and dark pages and by a screen reader. Nothing is downloaded.
"""

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.figure import Figure

INK = "#010203"
"""Axes, ticks and text: becomes the colour of the text around the figure."""
COLORS: Mapping[str, str] = MappingProxyType(
    {"plain": "#1f6fc4", "ppo": "#1a7f45", "band": "#c98a00", "mark": "#b3367a"}
)
"""Colour of each role on a light page; `figure.css` holds those of a dark one."""

WIDTH = 420.0
"""Width in CSS pixels that figures are laid out for: a phone's column, enlarged on wide pages."""

_STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "figure.dpi": 72,  # so that a matplotlib point is an SVG unit
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.size": 13,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "grid.linewidth": 0.8,
    "legend.facecolor": "none",
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 2.2,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "{http://www.w3.org/1999/xlink}href"


def new_figure(height: float = 280.0, width: float = WIDTH) -> Figure:
    """Return an empty matplotlib figure in the book's style.

    Parameters
    ----------
    height, width : float
        Size in CSS pixels.

    Returns
    -------
    matplotlib.figure.Figure
        Draw on it inside ``with style():``, then hand it to `Picture`.
    """
    with style():
        return Figure(figsize=(width / 72, height / 72), dpi=72)


def style() -> AbstractContextManager[None]:
    """Return the context in which matplotlib draws in the book's style."""
    # The defaults first: whatever a user's own style file says, the book looks the same.
    return mpl.rc_context({**mpl.rcParamsDefault, **_STYLE})


def to_svg(figure: Figure, name: str, alt: str) -> ET.Element:
    """Draw `figure` as an SVG element that can stand in a page beside others.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        What to draw. Artists with a `gid` keep it, behind the figure's name, as their id.
    name : str
        Unique on the page; letters, digits and hyphens.
    alt : str
        What there is to see, for those who cannot.

    Returns
    -------
    xml.etree.ElementTree.Element
        The ``<svg>``; the same figure gives the same bytes.

    Raises
    ------
    ValueError
        If the name has other characters or the text is empty.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"name must be lower-case letters, digits and hyphens, got {name!r}")
    if not alt.strip():
        raise ValueError(f"alt of figure {name!r} must say what there is to see, got {alt!r}")
    gids = {artist.get_gid() for artist in figure.findobj()} - {None}
    buffer = io.StringIO()
    with style(), mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    root = ET.fromstring(_recolor(buffer.getvalue()))

    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in {f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"}:
                parent.remove(child)
    text = ET.tostring(root, encoding="unicode")
    used = set(re.findall(r'url\(#([^)"]+)\)|href="#([^"]+)"', text))
    referenced = {one or other for one, other in used}
    for element in root.iter():
        identity = element.attrib.pop("id", None)
        if identity in gids:
            element.set("id", f"{name}-{identity}")
        elif identity is not None and identity in referenced:
            element.set("id", identity)
        if _XLINK in element.attrib:
            element.set("href", element.attrib.pop(_XLINK))
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("role", "img")
    root.set("aria-label", alt)
    return root


def svg_text(root: ET.Element) -> str:
    """Serialise an SVG element for HTML: no prolog, no prefixes, no line breaks between tags."""
    ET.register_namespace("", _SVG)
    text = ET.tostring(root, encoding="unicode")
    return re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", text))


def stylesheet() -> str:
    """Return the style sheet that every figure brings along."""
    return files("ppo_demo").joinpath("figure.css").read_text(encoding="utf-8").strip()


@dataclass(frozen=True)
class Picture:
    """A figure without sliders, shown by notebooks and the book as inline SVG.

    Attributes
    ----------
    figure : matplotlib.figure.Figure
        What is shown, made by `new_figure`.
    name : str
        Unique on the page; letters, digits and hyphens.
    alt : str
        What there is to see, for those who cannot.
    """

    figure: Figure
    name: str
    alt: str

    def _repr_html_(self) -> str:
        svg = svg_text(to_svg(self.figure, self.name, self.alt))
        return f'<style>{stylesheet()}</style><div class="ppo-figure">{svg}</div>'


@dataclass(frozen=True)
class Table:
    """A table, shown by notebooks and the book.

    Attributes
    ----------
    header : sequence of str
        One cell a column.
    rows : sequence of sequences of str
        Plain text; the first cell of each row is the row's header.
    caption : str
        What the table shows.

    Raises
    ------
    ValueError
        If a cell of the header is empty, or a row has not as many cells as the header.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str

    def __post_init__(self) -> None:
        if not all(cell.strip() for cell in self.header):
            raise ValueError(
                f"header of table {self.caption!r} must name every column, got {self.header}"
            )
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(
                    f"rows of table {self.caption!r} must have {len(self.header)} cells, got {row}"
                )

    def to_html(self) -> str:
        """Return the table as HTML; a wide one scrolls in a region of its own."""
        head = "".join(f'<th scope="col">{_cell(cell)}</th>' for cell in self.header)
        body = "".join(
            f'<tr><th scope="row">{_cell(first)}</th>'
            + "".join(f"<td>{_cell(cell)}</td>" for cell in rest)
            + "</tr>"
            for first, *rest in self.rows
        )
        caption = escape(self.caption)
        return (
            f'<div class="ppo-table" role="region" tabindex="0" aria-label="{caption}">'
            f"<table><caption>{caption}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def _repr_html_(self) -> str:
        return f"<style>{stylesheet()}</style>{self.to_html()}"


def _cell(text: str) -> str:
    signed = re.sub(r"(?<!\w)-(?=\d)", "−", escape(text))  # minus signs, not hyphens
    # A range in brackets stays on one line, and so does a Greek letter with its value.
    return re.sub(r"\([^)]*\)|[αβγελ] ", lambda m: m[0].replace(" ", "\N{NO-BREAK SPACE}"), signed)


def _recolor(svg: str) -> str:
    """Put CSS in the place of the colours and the font that matplotlib wrote."""
    svg = svg.replace(INK, "currentColor")
    for role, color in COLORS.items():
        svg = svg.replace(color, f"var(--ppo-{role}, {color})")
    svg = re.sub(r"font-family: [^;\"]+;? ?", "", svg)
    return re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", svg)
