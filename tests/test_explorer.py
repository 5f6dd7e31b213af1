"""The explorer: its grid, what it refuses, and that its drawing is matplotlib's own."""

import json
import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_demo.explorer import Channels, Explorer, Readout, Slider, number_text, quantize
from ppo_demo.figures import Picture, Table, new_figure, style, to_svg


def line(power):
    x = np.linspace(0, 1, 5)[None]
    return Channels(
        curves={"line": (x, x ** power[..., None])},
        moves={"dot": (0 * power + 0.5, 0.5**power)},
        numbers={"middle": 0.5**power},
    )


def draw(at, gids=("line", "dot")):
    with style():
        figure = new_figure(200)
        axes = figure.add_axes([0.1, 0.1, 0.8, 0.8])
        axes.plot(*at.curves["line"], gid=gids[0])
        axes.plot([0], [0], "o", gid=gids[1], clip_on=False)
        axes.set(xlim=(0, 1), ylim=(0, 1))
    return figure


def explorer(**changes):
    arguments = {
        "name": "powers",
        "title": "Powers",
        "sliders": [Slider("power", (1, 2, 3), 2, "Power")],
        "compute": line,
        "draw": draw,
        "readouts": [Readout("Middle", "{middle:.3f} at one half")],
        "alt": "A curve.",
        "table": [{"power": 3}],
    }
    return Explorer(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("values", "default", "message"),
    [
        ((0.1, 0.2), 0.3, r"default of slider 'ε' must be one of its values \[0.1, 0.2\], got 0.3"),
        ((0.2, 0.1), 0.1, "values of slider 'ε' must be two or more finite numbers in ascending"),
        ((0.2,), 0.2, "values of slider 'ε' must be two or more"),
        ((0.2, math.inf), 0.2, "values of slider 'ε' must be two or more finite"),
    ],
)
def test_bad_sliders_are_refused(values, default, message):
    with pytest.raises(ValueError, match=message):
        Slider("ε", values, default, "Clip range")


def test_names_stand_for_the_values_and_must_be_as_many():
    slider = Slider("metric", (0, 1), 1, "Curve", names=("gold", "KL"))
    assert [slider.text(value) for value in slider.values] == ["gold", "KL"]
    with pytest.raises(ValueError, match=r"names of slider 'metric' must be one for each of its 2"):
        Slider("metric", (0, 1), 1, "Curve", names=("gold",))


def with_more(power):
    there = np.array([True, False, True])
    texts = np.array(["one", "two <b>\nlines", f"three\nof\n{'them ' * 8}"])
    return replace(line(power), shown={"dot": there}, texts={"It says": texts})


def test_what_is_shown_and_what_is_said():
    html = explorer(compute=with_more).to_html()
    assert re.search(r'<g[^>]*id="powers-dot"[^>]*display="none"', html)
    assert "It says</span> " in html
    assert ">two &lt;b&gt;\nlines</output>" in html
    assert 'style="--wide: 3; --narrow: 4"' in html  # room for the longest
    data = json.loads(re.search(r'application/json">(.*?)</script>', html, re.DOTALL)[1])
    [text] = data["texts"]
    assert text["values"] == ["one", "two <b>\nlines", f"three\nof\n{'them ' * 8}"]
    [[identity, shown]] = data["shown"]
    assert identity == "powers-dot"
    assert np.cumsum(shown["steps"]).tolist() == [1, 0, 1]


def test_nan_in_a_curve_is_refused_and_its_place_named():
    def broken(power):
        channels = line(power)
        channels.curves["line"][1][1, 3] = math.nan
        return channels

    message = r"curve 'line' of explorer 'powers' must be finite, got nan at power=2"
    with pytest.raises(ValueError, match=message):
        explorer(compute=broken).to_html()


def test_wrong_shape_is_refused():
    broken = explorer(compute=lambda **_: Channels(numbers={"middle": np.ones((2,))}))
    with pytest.raises(ValueError, match=r"number 'middle' .* axes \(3,\).* got shape \(2,\)"):
        broken.to_html()


def test_channel_without_artist_is_refused():
    broken = explorer(draw=lambda at: draw(at, ("other", "dot")))
    with pytest.raises(ValueError, match="must draw an artist with gid 'line', got"):
        broken.to_html()


def test_readout_without_number_is_refused():
    broken = explorer(readouts=[Readout("Middle", "{median:.3f}")])
    with pytest.raises(ValueError, match=r"must name one of \['middle'\], got 'median'"):
        broken.to_html()


@pytest.mark.parametrize("template", ["{middle}", "{middle:d}", "{middle!r:.2f}", "{:.2f}"])
def test_bad_template_is_refused(template):
    with pytest.raises(ValueError, match=r"template of readout 'Middle' must have fields like"):
        _ = Readout("Middle", template).parts


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"power": 1.5}, r"power must be one of \[1, 2, 3\], got 1.5"),
        ({"exponent": 1}, r"has sliders \['power'\], got 'exponent'"),
    ],
)
def test_settings_off_the_grid_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        explorer().at(**setting)


def test_bad_names_and_empty_alt_are_refused():
    with pytest.raises(ValueError, match="name must be lower-case"):
        explorer(name="Two Words").to_html()
    with pytest.raises(ValueError, match="must say what there is to see"):
        explorer(alt=" ").to_html()


def test_default_drawing_is_matplotlibs_own():
    html = explorer().to_html()
    path = re.search(r'<path[^>]*id="powers-line"[^>]*>', html)[0]
    numbers = [float(n) for n in re.findall(r"[\d.]+", re.search(r' d="([^"]+)"', path)[1])]
    with style():
        own = to_svg(draw(explorer().at()), "own", "A curve.")
    drawn = own.find(".//{*}g[@id='own-line']/{*}path").get("d")
    np.testing.assert_allclose(
        numbers, [float(n) for n in re.findall(r"[\d.]+", drawn)], atol=0.051
    )


def test_data_holds_every_grid_point():
    html = explorer().to_html()
    data = json.loads(re.search(r'application/json">(.*?)</script>', html, re.DOTALL)[1])
    encoded = data["numbers"]["middle.3"]
    assert encoded["shape"] == [3]
    assert np.cumsum([int(step) for step in encoded["steps"]]).tolist() == [500, 250, 125]


def test_table_shows_the_default_and_the_settings():
    html = explorer().to_html()
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", html)
    assert cells == ["Power", "Middle", "2", "0.250 at one half", "3", "0.125 at one half"]


@given(st.floats(-1e4, 1e4), st.integers(0, 4))
def test_numbers_read_as_python_formats_them(value, decimals):
    text = f"{value:.{decimals}f}".replace("-", "−")
    zero = text.replace("−", "") if not float(text.replace("−", "")) else text
    assert number_text(quantize(value, decimals), decimals) == zero


def test_same_figure_gives_the_same_bytes():
    assert explorer().to_html() == explorer().to_html()


def test_figures_follow_the_page_and_not_the_users_style_file():
    import matplotlib as mpl

    plain = explorer().to_html()
    with mpl.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.facecolor": "red"}):
        assert explorer().to_html() == plain
    assert "currentColor" in plain
    assert "<text" in plain
    assert "#010203" not in plain


def test_picture_has_its_alternative_text():
    html = Picture(draw(explorer().at()), "one", "What there is.")._repr_html_()
    assert 'role="img" aria-label="What there is."' in html
    assert "<metadata" not in html


def test_table_refuses_ragged_rows():
    with pytest.raises(ValueError, match=r"rows of table 'T' must have 2 cells, got \['1'\]"):
        Table(["a", "b"], [["1"]], "T")
    with pytest.raises(ValueError, match="header of table 'T' must name every column"):
        Table(["", "b"], [["1", "2"]], "T")


def test_table_escapes_and_writes_minus_signs():
    html = Table(["<a>", "b"], [["x-1", "-1"]], "T").to_html()
    assert "&lt;a&gt;" in html
    assert "<td>−1</td>" in html
    assert "x-1" in html


def test_table_keeps_a_range_on_one_line():
    html = Table(["run", "gold"], [["PPO, β 0.05", "1.2 (-1.0 to 1.5)"]], "T").to_html()
    assert "<td>1.2 (−1.0\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}1.5)</td>" in html
    assert "PPO, β\N{NO-BREAK SPACE}0.05<" in html


@pytest.mark.parametrize("module", ["ppo_demo", "ppo_demo.surrogates", "ppo_demo.bandit"])
def test_formula_modules_import_neither_torch_nor_matplotlib(module):
    import subprocess

    code = f"import {module}, sys; print({{'torch', 'matplotlib'}} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stderr
