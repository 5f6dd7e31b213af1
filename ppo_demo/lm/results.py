"""What a sweep has found, as arrays: NumPy alone, so that pages that read it import no PyTorch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

LAST = 5
"""Results are means over this many last batches."""
METRICS: Mapping[str, int] = MappingProxyType(
    {"reward": 2, "gold": 2, "kl": 2, "clip_fraction": 3, "entropy": 3}
)
"""What is kept of a run's history, for every batch, and to how many decimals."""
STORED = Path(__file__).with_name("sweep.json")
"""The sweep that the book's lab shows."""

AXES = ("learning_rate", "clip_range", "kl_weight", "seed")
"""The settings that differ between runs of a sweep."""

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sweep:
    """A finished sweep, as arrays over the grid.

    Attributes
    ----------
    learning_rates, clip_ranges, kl_weights : tuple of float
        The grid's axes.
    seeds : tuple of int
        Of each point.
    curves : mapping of str to array, shape (learning rates, ε, β, seeds, batches)
        Of each of `METRICS`.
    samples : array of str, shape (learning rates, ε, β, reviews)
        What the policy of the first seed writes after training.
    facts : mapping
        Where it comes from: ``sources``, ``versions``, ``settings``, a digest of each seed's start
        in ``starts``, and ``seconds``, summed over the runs.
    """

    learning_rates: tuple[float, ...]
    clip_ranges: tuple[float, ...]
    kl_weights: tuple[float, ...]
    seeds: tuple[int, ...]
    curves: Mapping[str, Floats]
    samples: npt.NDArray[np.str_]
    facts: Mapping[str, Any]

    def ends(self, metric: str) -> Floats:
        """Means over the last batches; shape (learning rates, ε, β, seeds)."""
        return np.asarray(self.curves[metric][..., -LAST:].mean(-1))

    @property
    def gains(self) -> Floats:
        """Gold reward at the end less that of the first batch; shape as `ends`."""
        return np.asarray(self.ends("gold") - self.curves["gold"][..., 0])

    def frontier(self, metric: str) -> tuple[Floats, Floats]:
        """KL and metric, at the end, of the runs that no other run beats; by ascending KL."""
        kl, value = self.ends("kl").ravel(), self.ends(metric).ravel()
        best = frontier(kl, value)
        return kl[best], value[best]

    def early_sign(self, metric: str, batch: int) -> float:
        """How often a run that ends below its beginning has the higher metric early on.

        Parameters
        ----------
        metric : str
            One of `METRICS`.
        batch : int
            How many batches have been taken.

        Returns
        -------
        float
            Over all pairs of such a run and another, ties counted half: from 0 to 1, one half
            for no sign at all (the area under the ROC curve).
        """
        values, fell = self.curves[metric][..., batch - 1], self.gains < 0
        failing, others = values[fell][:, None], values[~fell]
        return float((failing > others).mean() + (failing == others).mean() / 2)

    def learned(self, gain: float = 0.5) -> npt.NDArray[np.bool_]:
        """Whether gold rises by `gain`; shape as `ends`."""
        return np.asarray(self.gains >= gain)

    def learns(self, gain: float = 0.5) -> npt.NDArray[np.bool_]:
        """Whether gold rises by `gain` on every seed; shape (learning rates, ε, β)."""
        return np.asarray(self.learned(gain).all(-1))

    def highest_learning_rate(self, gain: float = 0.5) -> Floats:
        """Highest learning rate that learns, NaN where none does; shape (ε, β)."""
        rates = np.asarray(self.learning_rates)[:, None, None]
        highest = np.where(self.learns(gain), rates, -np.inf).max(0)
        return np.where(np.isfinite(highest), highest, np.nan)


def frontier(cost: Floats, value: Floats) -> npt.NDArray[np.intp]:
    """Return which points no other beats: none has a higher value at the same or a lower cost.

    Parameters
    ----------
    cost, value : array, shape (points,)
        For example the KL divergence and the reward of runs.

    Returns
    -------
    array of int
        Their places, by ascending cost.
    """
    order = np.lexsort((-value, cost))
    best = np.maximum.accumulate(value[order])
    new = np.diff(best, prepend=-np.inf) > 0
    return order[new]


def load(path: Path = STORED) -> Sweep:
    """Return the sweep that the package holds.

    Raises
    ------
    ValueError
        If the file's runs do not fill a grid.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    runs = {tuple(run[name] for name in AXES): run for run in record["runs"]}
    axes = [tuple(sorted({key[i] for key in runs})) for i in range(len(AXES))]
    points = list(product(*axes))
    if set(points) != set(runs):
        raise ValueError(f"runs of {path.name} must fill their grid of {len(points)}")
    shape = tuple(map(len, axes))
    seconds = sum(run["seconds"] for run in record["runs"])
    every = [runs[point] for point in points]
    first = np.asarray([run["samples"] for run in every])
    learning_rates, clip_ranges, kl_weights, seeds = axes
    return Sweep(
        learning_rates,
        clip_ranges,
        kl_weights,
        seeds,
        curves={
            name: np.asarray([run["curves"][name] for run in every]).reshape(*shape, -1)
            for name in METRICS
        },
        samples=first.reshape(*shape, -1)[..., 0, :],
        facts={**{k: v for k, v in record.items() if k != "runs"}, "seconds": seconds},
    )
