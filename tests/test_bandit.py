"""Lab A's policy against a simulation by hand, with gradients worked out on paper."""

import itertools
import math

import numpy as np
import pytest

from ppo_demo.bandit import simulate
from ppo_demo.labs import LEARNING_RATES


def by_hand(learning_rate, clip_range=math.inf, kl_weight=0.0, updates=12):
    """Two actions, one logit z. dp/dz = p(1 - p); d KL/dz = z p(1 - p) from a reference of 1/2."""
    z, ratios = 0.0, [1.0]
    for _ in range(updates):
        p = 1 / (1 + math.exp(-z))
        slope = p * (1 - p)
        jump = 0 if 2 * p > 1 + clip_range else 0.8 * slope
        stay = 0 if 2 * (1 - p) < 1 - clip_range else 0.8 * slope
        z += learning_rate * (jump + stay - kl_weight * z * slope)
        ratios.append(2 / (1 + math.exp(-z)))
    return ratios


CORNERS = list(
    itertools.product(
        (LEARNING_RATES[0], 0.08, 0.9, LEARNING_RATES[-1]), (0.05, 0.2, 0.5), (0, 0.01, 1, 10)
    )
)


@pytest.mark.parametrize(("learning_rate", "clip_range", "kl_weight"), CORNERS)
def test_simulation_agrees_with_the_one_by_hand(learning_rate, clip_range, kl_weight):
    expected = by_hand(learning_rate, clip_range, kl_weight)
    np.testing.assert_allclose(simulate(learning_rate, clip_range, kl_weight), expected, rtol=1e-9)


def test_default_point():
    assert round(float(simulate(0.08, 0.2, 0.01)[-1]), 4) == 1.1875
    assert round(float(simulate(0.08)[-1]), 4) == 1.1877


def test_a_grid_is_the_same_as_its_points():
    rates, clips, weights = np.ix_([0.02, 1.3], [0.1, 0.4], [0.0, 3.0])
    grid = simulate(rates, clips, weights)
    assert grid.shape == (2, 2, 2, 13)
    np.testing.assert_array_equal(grid[1, 0, 1], simulate(1.3, 0.1, 3.0))


def test_the_clip_does_not_bound_the_ratio():
    path = simulate(1.3, clip_range=0.2, kl_weight=0)
    first = 2 / (1 + math.exp(-1.3 * 0.4))  # the first gradient is 1.6 · 1/4
    assert path[1] == pytest.approx(first)
    assert first > 1.2
    assert (path[1:] == path[1]).all()


def test_kl_term_pulls_back_to_the_bumper_and_large_steps_leave_it_again():
    path = simulate(1.3, clip_range=0.2, kl_weight=0.3, updates=200)
    steps = np.diff(path[1:])
    outside = path[1:-1] > 1.2
    assert (steps[outside] < 0).all()  # the cord alone
    assert (steps[~outside] > 0.2).all()  # one push, far out
    assert 0 < (~outside).sum() < outside.sum()
    assert path[2:].max() > path[1]
    settled = simulate(0.01, clip_range=0.2, kl_weight=0.3, updates=5000)[-200:]
    assert abs(settled - 1.2).max() < 0.005


def test_a_tenfold_spike_stops_at_the_first_ratio_beyond_the_bumper():
    path = simulate(0.8, clip_range=0.2)
    beyond = int(np.argmax(path > 1.2))
    assert path[beyond - 1] <= 1.2
    assert (path[beyond:] == path[beyond]).all()
    assert simulate(0.8)[-1] > 1.8


def test_kl_weight_balances_at_its_logit():
    for kl_weight in (1, 3, 10):
        ratio = simulate(0.2, kl_weight=kl_weight, updates=400)[-1]
        assert ratio == pytest.approx(2 / (1 + math.exp(-1.6 / kl_weight)), abs=5e-5)


def test_heavy_kl_weight_with_a_large_step_swings():
    path = simulate(1.3, clip_range=0.2, kl_weight=10)
    assert (np.sign(path[2:] - 1) * np.sign(path[1:-1] - 1) == -1).all()
    assert np.abs(path[2:] - 1).min() > 0.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 0.2, 0.0), "learning_rate must be above 0, got 0.0"),
        ((math.nan, 0.2, 0.0), "learning_rate must be above 0, got nan"),
        ((0.1, 0.0, 0.0), "clip_range must be above 0, got 0.0"),
        ((0.1, 0.2, -1.0), "kl_weight must be at least 0, got -1.0"),
        ((0.1, 0.2, 0.0, -1), "updates must be at least 0, got -1"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulate(*arguments)
