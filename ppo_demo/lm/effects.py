"""The effects that the book describes, measured over seeds: `python -m ppo_demo effects`.

Each seed has its own corpus, supervised start, reward model and training runs.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any

import torch

from ppo_demo.algorithms import ALGORITHMS
from ppo_demo.lm.bestofn import best_of_n, best_of_n_kl
from ppo_demo.lm.corpus import all_prompts, gold_reward, prompts, rule_reward
from ppo_demo.lm.model import PolicyValueModel
from ppo_demo.lm.pretrain import RewardModel
from ppo_demo.lm.results import LAST
from ppo_demo.lm.start import start
from ppo_demo.lm.trainer import TrainConfig, train, write_atomically
from ppo_demo.losses import Algorithm
from ppo_demo.provenance import study_digest
from ppo_demo.surrogates import Unclipped

STORED = Path(__file__).with_name("effects.json")
"""The study that the book's tables are printed from."""

PLAIN = replace(ALGORITHMS["ppo"], name="plain", ratio="none", clip=Unclipped())
"""The policy gradient without a ratio, over the same epochs as PPO."""
UNCLIPPED = replace(ALGORITHMS["ppo"], name="unclipped", clip=Unclipped())
"""PPO's importance weighting without its clip."""


@dataclass(frozen=True)
class Run:
    """One training run of the study.

    Attributes
    ----------
    label : str
        What it is called in tables.
    settings : mapping
        Fields of `TrainConfig` that differ from the default.
    """

    label: str
    settings: Mapping[str, float | str | Algorithm]


RUNS = (
    Run("PPO, lr 1e-3, β 0.05", {}),
    Run("PPO, lr 1e-3, β 0", {"kl_weight": 0.0}),
    Run("PPO, lr 1e-2, β 0.05", {"learning_rate": 1e-2}),
    Run("plain gradient, lr 1e-3", {"algorithm": PLAIN}),
    Run("plain gradient, lr 1e-2", {"algorithm": PLAIN, "learning_rate": 1e-2}),
    Run("unclipped ratio, lr 1e-3", {"algorithm": UNCLIPPED}),
    Run("unclipped ratio, lr 1e-2", {"algorithm": UNCLIPPED, "learning_rate": 1e-2}),
)
"""The runs on the reward model that the effects compare."""

NO_RATIO: Mapping[str, float | str] = MappingProxyType({"epochs": 1, "minibatches": 8})
"""Without a ratio nothing corrects for old samples: one pass, with as many steps."""


def by_rule(key: str) -> Run:
    """Return the run of a row of `ALGORITHMS` on the rule's reward, at the same budget."""
    row = ALGORITHMS[key]
    passes = NO_RATIO if row.ratio == "none" else {}
    return Run(row.name, {"algorithm": key, "reward": "rule", **passes})


SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Of best-of-n."""


def measure(
    run: Run, seed: int, policy: PolicyValueModel, reward_model: RewardModel
) -> dict[str, float]:
    """Train and return the metrics of the end, means over the last batches.

    Parameters
    ----------
    run : Run
        What to train.
    seed : int
        Of the training.
    policy, reward_model
        From `start`.

    Returns
    -------
    dict of str to float
        ``reward``, ``gold``, ``rule``, ``kl``, ``length`` and ``best_gold``, the highest gold
        reward of any batch.
    """
    settings: dict[str, Any] = {"seed": seed, **run.settings}
    config = TrainConfig(**settings)
    history = train(config, policy, reward_model).history
    names = ("reward", "gold", "rule", "kl", "length")
    found = {name: mean(m[name] for m in history[-LAST:]) for name in names}
    return {**found, "best_gold": max(m["gold"] for m in history)}


def choose(
    seed: int, policy: PolicyValueModel, reward_model: RewardModel, count: int = 512
) -> dict[str, dict[str, float]]:
    """Measure best-of-n by the reward model, for all `SIZES`.

    Parameters
    ----------
    seed : int
        Of the sampling.
    policy, reward_model
        From `start`.
    count : int
        Prompts.

    Returns
    -------
    dict of str to dict
        ``reward``, ``gold``, ``rule`` and ``kl`` by label, ``best of n``.
    """
    generator = torch.Generator().manual_seed(seed)
    divergences = best_of_n_kl(policy, reward_model, all_prompts(), SIZES, generator)
    found = {}
    for n, kl in zip(SIZES, divergences, strict=True):
        chosen = best_of_n(policy, reward_model, prompts(count, generator), n, generator).tokens
        found[f"best of {n}"] = {
            "reward": reward_model(chosen).mean().item(),
            "gold": gold_reward(chosen).mean().item(),
            "rule": rule_reward(chosen).mean().item(),
            "kl": kl,
        }
    return found


def study(seed: int, progress: Callable[[str], None] = print) -> dict[str, dict[str, float]]:
    """Measure everything for one seed.

    Parameters
    ----------
    seed : int
        Of corpus, start, reward model and training.
    progress : callable
        Told what comes next.

    Returns
    -------
    dict of str to dict
        Results by label: the runs, ``best of n`` for each size, and the rows by the rule.
    """
    progress(f"seed {seed}: supervised start and reward model")
    begun = start(seed)
    found: dict[str, dict[str, float]] = {}
    for run in (*RUNS, *(by_rule(key) for key in ALGORITHMS)):
        progress(f"seed {seed}: {run.label}")
        found[run.label if run in RUNS else f"rule: {run.label}"] = measure(run, seed, *begun)
    progress(f"seed {seed}: best of n")
    return found | choose(seed, *begun)


def sources(studies: list[dict[str, dict[str, float]]]) -> str:
    """Return the digest of the code that studies depend on, and of the rows that they ran."""
    rows = [row for row in ALGORITHMS.values() if f"rule: {row.name}" in studies[0]]
    return study_digest(__name__, rows=[*rows, *RUNS])


def save(studies: list[dict[str, dict[str, float]]]) -> None:
    """Keep a study in the package, with what made it."""
    record = {
        "sources": sources(studies),
        "versions": {"torch": torch.__version__},
        "studies": [
            {k: {n: round(v, 4) for n, v in found.items()} for k, found in s.items()}
            for s in studies
        ],
    }
    write_atomically(STORED, json.dumps(record, indent=1).encode())


def load() -> list[dict[str, dict[str, float]]]:
    """Return the study that the package holds, one dictionary a seed; see `study`."""
    record = json.loads(STORED.read_text(encoding="utf-8"))
    studies: list[dict[str, dict[str, float]]] = record["studies"]
    return studies


def table(studies: list[dict[str, dict[str, float]]], labels: list[str], names: list[str]) -> str:
    """Return results as text: of each label and metric, the mean, lowest and highest over seeds.

    Parameters
    ----------
    studies : list
        From `study`, one a seed.
    labels, names : list of str
        Rows and columns.

    Returns
    -------
    str
        A table with a line of headings.
    """
    width = max(map(len, labels)) + 2
    lines = [" " * width + "".join(f"{name:>24}" for name in names)]
    for label in labels:
        cells = []
        for name in names:
            values = [s[label][name] for s in studies if name in s[label]]
            low, high = min(values), max(values)
            cells.append(f"{mean(values):8.2f} ({low:6.2f} …{high:6.2f})")
        lines.append(f"{label:<{width}}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def claims(studies: list[dict[str, dict[str, float]]]) -> dict[str, int]:
    """Count the seeds on which each effect of the book holds.

    Parameters
    ----------
    studies : list
        From `study`, one a seed.

    Returns
    -------
    dict of str to int
        Seeds on which it holds, by what is claimed.
    """

    def count(holds: Callable[[dict[str, dict[str, float]]], bool]) -> int:
        return sum(holds(s) for s in studies)

    held, free, fast = (RUNS[i].label for i in (0, 1, 2))
    plain, plain_fast, unclipped_fast = (RUNS[i].label for i in (3, 4, 6))
    return {
        "PPO ends above +1 in gold reward": count(lambda s: s[held]["gold"] > 1),
        "plain gradient at lr 1e-3 ends below where it began": count(
            lambda s: s[plain]["gold"] < s["best of 1"]["gold"]
        ),
        "plain gradient at lr 1e-3 ends below PPO at that rate": count(
            lambda s: s[plain]["gold"] < s[held]["gold"]
        ),
        "plain gradient at lr 1e-2 ends below where it began": count(
            lambda s: s[plain_fast]["gold"] < s["best of 1"]["gold"]
        ),
        "unclipped ratio at lr 1e-2 ends below where it began": count(
            lambda s: s[unclipped_fast]["gold"] < s["best of 1"]["gold"]
        ),
        "unclipped ratio at lr 1e-2 ends below PPO at that rate": count(
            lambda s: s[unclipped_fast]["gold"] < s[fast]["gold"]
        ),
        "PPO at lr 1e-2 ends above where it began": count(
            lambda s: s[fast]["gold"] > s["best of 1"]["gold"]
        ),
        "β = 0: proxy higher than with β = 0.05": count(
            lambda s: s[free]["reward"] > s[held]["reward"]
        ),
        "β = 0: gold lower than with β = 0.05": count(lambda s: s[free]["gold"] < s[held]["gold"]),
        "PPO's proxy is above that of best of 64": count(
            lambda s: s[held]["reward"] > s["best of 64"]["reward"]
        ),
    }
