"""What the labs compute and read, against the specification's figures and by hand."""

import math

import numpy as np
import pytest
from test_bandit import by_hand

from ppo_demo.labs import LEARNING_RATES, clipping_lab, policy_update_lab


@pytest.fixture(scope="module")
def lab_a():
    return policy_update_lab()


@pytest.fixture(scope="module")
def lab_b():
    return clipping_lab()


def read(lab, **setting):
    at = lab.at(**setting)
    return [lab.read(readout, at) for readout in lab.readouts]


def test_lab_a_grid(lab_a):
    sizes = [len(slider.values) for slider in lab_a.sliders]
    assert math.prod(sizes) >= 768
    assert sizes[0] >= 12
    assert sizes[1:] == [8, 8]
    assert LEARNING_RATES[0] == 0.01
    assert LEARNING_RATES[-1] > 1
    ratios = np.diff(np.log(LEARNING_RATES))
    np.testing.assert_allclose(ratios, np.log(2) / 2, atol=0.06)  # half octaves, to two digits
    assert lab_a.sliders[1].values[0] == 0.05
    assert lab_a.sliders[1].values[-1] == 0.5
    assert lab_a.sliders[2].values[:2] == (0, 0.01)
    assert lab_a.sliders[2].values[-1] == 10


def test_lab_a_default(lab_a):
    assert [s.default for s in lab_a.sliders] == [0.08, 0.2, 0.01]
    assert read(lab_a) == ["1.19 (clipped) vs 1.19 (unclipped)"]
    curve = lab_a.at().curves["ppo"][1]
    assert curve.shape == (13,)
    assert curve[0] == 1


@pytest.mark.parametrize(
    "setting", [(0.01, 0.05, 0), (2.6, 0.5, 10), (2.6, 0.05, 0), (0.32, 0.2, 3), (1.3, 0.2, 10)]
)
def test_lab_a_reads_what_a_simulation_by_hand_gives(lab_a, setting):
    names = [slider.name for slider in lab_a.sliders]
    ppo, plain = by_hand(*setting)[-1], by_hand(setting[0])[-1]
    expected = f"{ppo:.2f} (clipped) vs {plain:.2f} (unclipped)"
    assert read(lab_a, **dict(zip(names, setting, strict=True))) == [expected]


def test_lab_a_picture_moves(lab_a):
    at = lab_a.at(learning_rate=1.3, clip_range=0.3, kl_weight=0)
    ppo, plain = at.numbers["ppo"], at.numbers["plain"]
    assert at.moves["ppo-bot"][0] == ppo
    assert at.moves["plain-bot"][0] == plain
    x, _ = at.curves["cord"]
    assert (x[0], x[-1]) == (1, pytest.approx(ppo))  # from the console to the bot
    # A bot whose middle is at 1 ± ε touches the bumper with its side.
    assert at.moves["high-bumper"][0] == pytest.approx(1.3 + 0.11)
    assert at.moves["low-bumper"][0] == pytest.approx(0.7 - 0.11)
    strong = lab_a.at(kl_weight=10).widths["cord"]
    assert strong > lab_a.at(kl_weight=0).widths["cord"]


def test_lab_b_default(lab_b):
    assert [s.default for s in lab_b.sliders] == [1.3, 0.8, 0.2]
    assert read(lab_b) == ["1.040", "1.200", "0.960"]


@pytest.mark.parametrize(
    ("ratio", "advantage", "clip_range", "expected"),
    [
        (1.3, -0.8, 0.2, ["−1.040", "1.200", "−1.040"]),  # the min, not the clip alone
        (0.7, -0.8, 0.2, ["−0.560", "0.800", "−0.640"]),
        (0.7, 0.8, 0.2, ["0.560", "0.800", "0.560"]),
        (2.5, 2, 0.5, ["5.000", "1.500", "3.000"]),
        (0, -2, 0.05, ["0.000", "0.950", "−1.900"]),
        (1.3, 0, 0.2, ["0.000", "1.200", "0.000"]),
    ],
)
def test_lab_b_by_hand(lab_b, ratio, advantage, clip_range, expected):
    assert read(lab_b, ratio=ratio, advantage=advantage, clip_range=clip_range) == expected


@pytest.mark.parametrize(
    ("ratio", "advantage", "push"),
    [(1.3, 0.8, 0), (1.1, 0.8, 0.8), (1.3, -0.8, -0.8), (0.7, -1, 0)],
)
def test_lab_b_arrow_is_the_push_that_is_left(lab_b, ratio, advantage, push):
    x, _ = lab_b.at(ratio=ratio, advantage=advantage).curves["push"]
    reach = x[np.argmax(np.abs(x - ratio))] - ratio
    assert reach == pytest.approx(0.25 * push)


def test_lab_b_curves_meet_the_dots(lab_b):
    at = lab_b.at(ratio=0.45, advantage=-1.3, clip_range=0.35)
    for curve, dot in (("objective", "objective-dot"), ("unclipped", "unclipped-dot")):
        x, y = at.moves[dot]
        assert np.interp(x, *at.curves[curve]) == pytest.approx(y)
