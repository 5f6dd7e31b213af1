"""Speed of the labs: `nox -s benchmark` prints what it measures."""

import statistics
import time

import numpy as np
import pytest

from ppo_demo.bandit import simulate
from ppo_demo.labs import policy_update_lab

MOVES = """
(name) => {
    const explorer = document.getElementById(name);
    const times = [];
    for (let round = 0; round < 20; round += 1) {
        for (const input of explorer.querySelectorAll('input')) {
            const moves = Number(input.max) + 1;
            const start = performance.now();  // its clock is too coarse for a single move
            for (let i = 0; i < moves; i += 1) {
                input.value = i;
                input.dispatchEvent(new Event('input', { bubbles: true }));
            }
            times.push((performance.now() - start) / moves);
        }
    }
    return times;
}
"""


def median_seconds(function, repeats):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def test_whole_grid_against_a_loop_over_its_points():
    lab = policy_update_lab()
    grid = [np.asarray(slider.values, dtype=float) for slider in lab.sliders]
    mesh = np.ix_(*grid)
    points = [(a, b, c) for a in grid[0] for b in grid[1] for c in grid[2]]

    def loop():
        return [simulate(*point) for point in points]

    np.testing.assert_array_equal(simulate(*mesh).reshape(-1, 13), loop())
    whole = median_seconds(lambda: simulate(*mesh), 20)
    one_by_one = median_seconds(loop, 1)
    ratio = one_by_one / whole
    print(
        f"\nLab A, {len(points)} grid points: one call {whole * 1e3:.1f} ms, "
        f"a loop {one_by_one * 1e3:.0f} ms: {ratio:.0f} times faster (wanted: 50)"
    )
    assert ratio >= 50


@pytest.mark.parametrize(
    ("name", "path"),
    [("lab-a", "ppo.html"), ("lab-b", "ppo.html"), ("lab-c", "hyperparameters.html")],
)
def test_script_time_of_a_slider_move(open_page, name, path):
    page = open_page(path)
    times = page.evaluate(MOVES, name)
    median, worst = statistics.median(times), max(times)
    print(
        f"\n{name}, {len(times)} sweeps of a slider: median {median:.3f} ms of script a move, "
        f"slowest sweep {worst:.3f} ms (wanted: median under 4)"
    )
    assert median < 4
