"""A figure over a parameter grid: drawn once, with the curves of every grid point beside it.

Moving a slider computes nothing in the browser. It looks up what Python computed for that grid
point and swaps a few attributes of the SVG. Without JavaScript the page shows the figure and
its readouts at the default setting, and a table of others.
"""

import html
import json
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from itertools import groupby, pairwise
from typing import Any, TypeAlias
from xml.etree import ElementTree as ET

import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ppo_demo.figures import Table, stylesheet, svg_text, to_svg

Floats: TypeAlias = npt.NDArray[np.float64]

COORDINATE_DECIMALS = 1
"""Drawn coordinates are kept to a tenth of an SVG unit, finer than a pixel; so in explorer.js."""


@dataclass(frozen=True)
class Slider:
    """One axis of the grid.

    Attributes
    ----------
    name : str
        Argument of the explorer's function; also its key in the page's address.
    values : sequence of float
        The grid, ascending.
    default : float
        Where the slider starts; one of `values`.
    label : str
        What readers call it.
    unit : str
        Written behind a value.
    names : sequence of str
        What readers see in the place of the values, where these only count choices.

    Raises
    ------
    ValueError
        If there are fewer than two values, they do not ascend, the default is not one of
        them, or there are names but not one for each.
    """

    name: str
    values: Sequence[float]
    default: float
    label: str
    unit: str = ""
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        values = [float(value) for value in self.values]
        ascending = all(a < b for a, b in pairwise(values)) and all(map(math.isfinite, values))
        if len(values) < 2 or not ascending:
            raise ValueError(
                f"values of slider {self.name!r} must be two or more finite numbers in "
                f"ascending order, got {values}"
            )
        if self.default not in values:
            raise ValueError(
                f"default of slider {self.name!r} must be one of its values {values}, "
                f"got {self.default!r}"
            )
        if self.names and len(self.names) != len(values):
            raise ValueError(
                f"names of slider {self.name!r} must be one for each of its {len(values)} "
                f"values, got {list(self.names)}"
            )

    def text(self, value: float) -> str:
        """Return a value as readers see it."""
        if self.names:
            return self.names[list(self.values).index(value)]
        return f"{value:g}{self.unit}".replace("-", "−")


@dataclass(frozen=True)
class Readout:
    """A line of text with numbers that depend on the sliders.

    Attributes
    ----------
    label : str
        What the numbers are.
    template : str
        Text with fields such as ``{objective:.3f}``, named as in `Channels.numbers`.
    """

    label: str
    template: str

    @property
    def parts(self) -> list[tuple[str, str, int]]:
        """Literal text, name and decimals of each field, in order; the last name may be ''."""
        found = []
        for literal, name, spec, conversion in string.Formatter().parse(self.template):
            if name is None:
                found.append((literal, "", 0))
                continue
            decimals = re.fullmatch(r"\.(\d)f", spec or "")
            if not decimals or not name or conversion:
                raise ValueError(
                    f"template of readout {self.label!r} must have fields like {{x:.2f}}, "
                    f"got {self.template!r}"
                )
            found.append((literal, name, int(decimals[1])))
        return found


@dataclass(frozen=True)
class Channels:
    """What changes with the sliders, over the whole grid or at one point of it.

    Over a grid with k sliders every array has k leading axes in the sliders' order. An axis on
    which a value does not depend may have length 1: broadcasting keeps the page small.

    Attributes
    ----------
    curves : mapping of str to (x, y)
        For each line or polygon, by `gid`: data coordinates, shape grid + (points,).
    moves : mapping of str to (x, y)
        For each artist that is shifted, by `gid`: where its origin goes, shape grid.
    numbers : mapping of str to array
        For the readouts, shape grid.
    widths : mapping of str to array
        Stroke widths in SVG units by `gid`, shape grid.
    shown : mapping of str to array of bool
        Whether an artist, or axes with all that is on them, is there; by `gid`, shape grid.
    texts : mapping of str to array of str
        Excerpts below the figure by what they are, shape grid; lines stay lines.
    """

    curves: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)
    moves: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)
    numbers: Mapping[str, Floats] = field(default_factory=dict)
    widths: Mapping[str, Floats] = field(default_factory=dict)
    shown: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    texts: Mapping[str, npt.NDArray[np.str_]] = field(default_factory=dict)

    def map(self, function: Callable[[str, Any, int], Any]) -> "Channels":
        """Apply `function(what, array, trailing axes)` to every array."""
        return Channels(
            curves={
                k: (function(f"curve {k!r}", x, 1), function(f"curve {k!r}", y, 1))
                for k, (x, y) in self.curves.items()
            },
            moves={
                k: (function(f"move {k!r}", x, 0), function(f"move {k!r}", y, 0))
                for k, (x, y) in self.moves.items()
            },
            numbers={k: function(f"number {k!r}", v, 0) for k, v in self.numbers.items()},
            widths={k: function(f"width {k!r}", v, 0) for k, v in self.widths.items()},
            shown={k: function(f"shown {k!r}", v, 0) for k, v in self.shown.items()},
            texts={k: function(f"text {k!r}", v, 0) for k, v in self.texts.items()},
        )


@dataclass(frozen=True)
class Explorer:
    """A figure with sliders.

    Attributes
    ----------
    name : str
        Unique on the page; lower-case letters, digits and hyphens.
    title : str
        Heading of the panel.
    sliders : sequence of Slider
        The axes of the grid.
    compute : callable
        Takes one array per slider, by name, shaped to broadcast over the grid, and returns
        `Channels` for all of it.
    draw : callable
        Takes the `Channels` at the default point and returns the figure. Artists that change
        carry the channel's name as their `gid`; those that move are drawn at their origin.
    readouts : sequence of Readout
        What the panel says in numbers.
    alt : str
        What there is to see.
    table : sequence of mappings
        A few settings for the table, each a slider's name to its value; sliders left out stand
        at their default.
    """

    name: str
    title: str
    sliders: Sequence[Slider]
    compute: Callable[..., Channels]
    draw: Callable[[Channels], Figure]
    readouts: Sequence[Readout]
    alt: str
    table: Sequence[Mapping[str, float]] = ()

    @cached_property
    def channels(self) -> Channels:
        """Everything at every grid point; computed once, checked.

        Raises
        ------
        ValueError
            If an array does not fit the grid or holds a value that is not finite. The message
            names the channel and the grid point.
        """
        grid = tuple(len(slider.values) for slider in self.sliders)
        mesh = np.ix_(*(np.asarray(s.values, dtype=np.float64) for s in self.sliders))
        arguments = {s.name: axis for s, axis in zip(self.sliders, mesh, strict=True)}

        def check(what: str, array: Any, trailing: int) -> Any:
            array = np.asarray(array)
            if array.dtype.kind not in ("b", "U"):
                array = array.astype(np.float64)
            lead = array.shape[: array.ndim - trailing]
            fits = len(lead) == len(grid) and all(
                a in (1, b) for a, b in zip(lead, grid, strict=True)
            )
            if not fits:
                raise ValueError(
                    f"{what} of explorer {self.name!r} must have the grid's axes {grid} "
                    f"(or 1) and {trailing} more, got shape {array.shape}"
                )
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                where = np.argwhere(~np.isfinite(array))[0]
                point = ", ".join(
                    f"{s.name}={s.values[i]:g}" for s, i in zip(self.sliders, where, strict=False)
                )
                raise ValueError(
                    f"{what} of explorer {self.name!r} must be finite, "
                    f"got {array[tuple(where)]} at {point}"
                )
            return array

        return self.compute(**arguments).map(check)

    def at(self, **setting: float) -> Channels:
        """Return what Python computed for one grid point; sliders left out are at their default.

        Raises
        ------
        ValueError
            If a name is not a slider's or a value is not on its grid.
        """
        unknown = sorted(setting.keys() - {s.name for s in self.sliders})
        if unknown:
            raise ValueError(
                f"explorer {self.name!r} has sliders {[s.name for s in self.sliders]}, "
                f"got {unknown[0]!r}"
            )
        index = []
        for slider in self.sliders:
            value = setting.get(slider.name, slider.default)
            if value not in list(slider.values):
                raise ValueError(
                    f"{slider.name} must be one of {list(slider.values)}, got {value!r}"
                )
            index.append(list(slider.values).index(value))

        def pick(_what: str, array: Any, _trailing: int) -> Any:
            place = (0 if n == 1 else i for n, i in zip(array.shape, index, strict=False))
            return np.asarray(array[tuple(place)])

        return self.channels.map(pick)

    def read(self, readout: Readout, at: Channels) -> str:
        """Return a readout's text at one grid point."""
        return "".join(
            literal + (number_text(quantize(at.numbers[name], decimals), decimals) if name else "")
            for literal, name, decimals in readout.parts
        )

    def to_html(self) -> str:
        """Return the explorer as a piece of HTML that needs nothing else.

        Raises
        ------
        ValueError
            If a channel has no artist of its name in the figure, or a readout no number.
        """
        at = self.at()
        figure = self.draw(at)
        root = to_svg(figure, self.name, self.alt)
        data = self._bind(figure, root)
        texts = [self.read(readout, at) for readout in self.readouts]
        payload = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
        return (
            f"<style>{stylesheet()} {_asset('explorer.css')}</style>"
            f'<ppo-explorer id="{self.name}" role="group" aria-labelledby="{self.name}-title">'
            f'<p class="ppo-title" id="{self.name}-title">{html.escape(self.title)}</p>'
            f'<div class="ppo-panes"><div class="ppo-figure">{svg_text(root)}</div>'
            f'<div class="ppo-controls">{self._form()}{self._outputs(texts)}'
            f'<p class="ppo-said" role="status"></p></div></div>'
            f"{self._excerpts(at)}{self._settings()}"
            f'<script type="application/json">{payload}</script>'
            f"</ppo-explorer><script>{_asset('explorer.js')}</script>"
        )

    _repr_html_ = to_html

    def _form(self) -> str:
        rows = "".join(
            f'<label for="{self.name}-{s.name}">{html.escape(s.label)}</label>'
            f'<output for="{self.name}-{s.name}" aria-live="off">{s.text(s.default)}</output>'
            f'<input type="range" id="{self.name}-{s.name}" name="{s.name}" min="0" '
            f'max="{len(s.values) - 1}" step="1" autocomplete="off" '
            f'value="{list(s.values).index(s.default)}" aria-valuetext="{s.text(s.default)}">'
            for s in self.sliders
        )
        return (
            f'<form hidden aria-label="Settings of {html.escape(self.title)}">{rows}'
            '<button type="reset">Reset</button></form>'
        )

    def _outputs(self, texts: Sequence[str]) -> str:
        rows = "".join(
            f"<p><span>{html.escape(readout.label)}</span> "
            f'<output class="ppo-readout" aria-live="off">{html.escape(text)}</output></p>'
            for readout, text in zip(self.readouts, texts, strict=True)
        )
        return f'<div class="ppo-readouts">{rows}</div>'

    def _excerpts(self, at: Channels) -> str:
        rows = []
        for label, text in at.texts.items():
            # Room for the longest, so that nothing below moves with a slider.
            wide, narrow = (
                max(_lines(str(other), width) for other in self.channels.texts[label].flat)
                for width in (64, 32)
            )
            rows.append(
                f"<p><span>{html.escape(label)}</span> "
                f'<output class="ppo-text" aria-live="off" style="--wide: {wide}; '
                f'--narrow: {narrow}">'
                f"{html.escape(str(text))}</output></p>"
            )
        return f'<div class="ppo-texts">{"".join(rows)}</div>' if rows else ""

    def _settings(self) -> str:
        if not self.table:
            return ""
        rows = []
        for setting in ({}, *self.table):
            at = self.at(**setting)
            rows.append(
                [s.text(setting.get(s.name, s.default)) for s in self.sliders]
                + [self.read(readout, at) for readout in self.readouts]
            )
        header = [s.label for s in self.sliders] + [r.label for r in self.readouts]
        table = Table(header, rows, f"{self.title}: some settings, the default first").to_html()
        return f"<details><summary>Some settings as a table</summary>{table}</details>"

    def _bind(self, figure: Figure, root: ET.Element) -> dict[str, Any]:
        """Tie channels to SVG elements; write the default as the script will write it."""
        channels, artists = self.channels, _artists(figure)
        elements = {e.get("id"): e for e in root.iter() if e.get("id")}
        height = figure.get_figheight() * 72

        def find(gid: str) -> tuple[Artist, ET.Element]:
            if gid not in artists:
                raise ValueError(
                    f"explorer {self.name!r} must draw an artist with gid {gid!r}, "
                    f"got {sorted(artists)}"
                )
            return artists[gid], elements[f"{self.name}-{gid}"]

        def place(artist: Artist, x: Floats, y: Floats) -> tuple[Floats, Floats]:
            """From data coordinates to SVG's; an axis that neither needs stays at length 1."""
            assert artist.axes is not None
            scale = artist.axes.transData
            if scale.is_separable:  # each coordinate keeps its own axes
                to_x = scale.transform(np.stack([x.ravel(), np.full(x.size, y.flat[0])], -1))
                to_y = scale.transform(np.stack([np.full(y.size, x.flat[0]), y.ravel()], -1))
                return to_x[:, 0].reshape(x.shape), height - to_y[:, 1].reshape(y.shape)
            raise ValueError(f"artist {artist.get_gid()!r} must be on axes with separable scales")

        curves, moves, widths = [], [], []
        for gid, (x, y) in channels.curves.items():
            artist, element = find(gid)
            to_x, to_y = place(artist, x, y)
            path = element if element.tag.endswith("path") else element.find(".//{*}path")
            assert path is not None
            path.set("id", element.attrib.pop("id"))
            closed = isinstance(artist, Patch)
            curve = [_encode(to, COORDINATE_DECIMALS, points=True) for to in (to_x, to_y)]
            at = self.at().curves[gid]
            path.set("d", path_text(*place(artist, *at), closed=closed))
            curves.append([path.get("id"), int(closed), *curve])
        for gid, (x, y) in channels.moves.items():
            artist, element = find(gid)
            to_x, to_y = place(artist, x, y)
            zero_x, zero_y = place(artist, np.zeros(1), np.zeros(1))
            at_x, at_y = place(artist, *(np.atleast_1d(v) for v in self.at().moves[gid]))
            shift = " ".join(map(_coordinate, (at_x[0] - zero_x[0], at_y[0] - zero_y[0])))
            element.set("transform", f"translate({shift})")
            offsets = (to_x - zero_x, to_y - zero_y)
            moves.append([element.get("id"), *(_encode(o, COORDINATE_DECIMALS) for o in offsets)])
        for gid, width in channels.widths.items():
            if gid not in channels.curves:
                raise ValueError(
                    f"width {gid!r} of explorer {self.name!r} must be that of one of its curves "
                    f"{sorted(channels.curves)}"
                )
            element = next(e for e in root.iter() if e.get("id") == f"{self.name}-{gid}")
            style = re.sub(r"stroke-width: [\d.]+;? ?", "", element.get("style", ""))
            element.set("style", style)  # a style would win over the attribute
            element.set("stroke-width", _coordinate(self.at().widths[gid]))
            widths.append([element.get("id"), _encode(width, COORDINATE_DECIMALS)])

        shown = []
        for gid, there in channels.shown.items():
            _, element = find(gid)
            if not self.at().shown[gid]:
                element.set("display", "none")
            shown.append([element.get("id"), _encode(there.astype(np.float64), 0)])

        numbers: dict[str, Any] = {}
        for readout in self.readouts:
            for _, name, decimals in readout.parts:
                if not name:
                    continue
                if name not in channels.numbers:
                    raise ValueError(
                        f"readout {readout.label!r} of explorer {self.name!r} must name one of "
                        f"{sorted(channels.numbers)}, got {name!r}"
                    )
                numbers[f"{name}.{decimals}"] = _encode(channels.numbers[name], decimals)
        return {
            "sliders": [
                {"name": s.name, "values": list(s.values), "texts": [s.text(v) for v in s.values]}
                for s in self.sliders
            ],
            "curves": curves,
            "moves": moves,
            "widths": widths,
            "shown": shown,
            "texts": [
                {"label": label, "shape": list(text.shape), "values": text.ravel().tolist()}
                for label, text in channels.texts.items()
            ],
            "numbers": numbers,
            "readouts": [{"label": r.label, "parts": r.parts} for r in self.readouts],
        }


def quantize(values: npt.ArrayLike, decimals: int) -> npt.NDArray[np.int64]:
    """Round to `decimals` decimals, halves to even as Python's formatting, as whole numbers."""
    # Multiplying first would round 0.285 and its like the other way.
    rounded = np.vectorize(lambda v: round(float(f"{v:.{decimals}f}") * 10**decimals), [np.int64])
    return np.asarray(rounded(np.asarray(values)))


def number_text(whole: npt.ArrayLike, decimals: int) -> str:
    """Return a quantised number as text; explorer.js does the same."""
    whole = int(whole)  # type: ignore[arg-type]
    text = f"{abs(whole):0{decimals + 1}d}"
    body = f"{text[:-decimals]}.{text[-decimals:]}" if decimals else text
    return ("−" if whole < 0 else "") + body


def path_text(x: Floats, y: Floats, *, closed: bool = False) -> str:
    """Return SVG path data through points, in the form that explorer.js writes."""
    lines = "L".join(f"{_coordinate(a)} {_coordinate(b)}" for a, b in zip(x, y, strict=True))
    return f"M{lines}{'Z' if closed else ''}"


def _lines(text: str, width: int) -> int:
    """Return how many lines a text takes where `width` characters fit into one."""
    return sum(max(1, math.ceil(len(line) / width)) for line in text.split("\n"))


def _coordinate(value: npt.ArrayLike) -> str:
    return f"{int(quantize(value, COORDINATE_DECIMALS)) / 10**COORDINATE_DECIMALS:g}"


def _encode(values: Floats, decimals: int, *, points: bool = False) -> dict[str, Any]:
    """Pack an array as its shape and the steps between whole numbers.

    Neighbours on the grid are alike, so steps are small and mostly 0; a run of zeros is kept
    as a string that counts them. The points of a curve come first, for longer runs.
    """
    if points:
        values = np.moveaxis(values, -1, 0)
    steps: list[int | str] = []
    for step, run in groupby(np.diff(quantize(values, decimals).ravel(), prepend=0).tolist()):
        count = len(list(run))
        steps.extend([step] * count if step or count == 1 else [str(count)])
    return {"shape": list(values.shape), "steps": steps}


def _artists(figure: Figure) -> dict[str, Artist]:
    return {str(a.get_gid()): a for a in figure.findobj() if a.get_gid()}


def _asset(name: str) -> str:
    return files("ppo_demo").joinpath(name).read_text(encoding="utf-8").strip()
