"""Advantages over time and over groups: what they are tried on, and what goes wrong."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from ppo_demo._arrays import alike, as_mask, deviation, keep, namespace
from ppo_demo.advantages import gae, whiten
from ppo_demo.check.engine import Example, Fault, Subject
from ppo_demo.losses import Algorithm, completion_advantages

# --- over time ---


@dataclass(frozen=True)
class Time:
    """Generalised advantage estimation, taken apart so that faults can be put into it.

    Attributes
    ----------
    gamma, lam : float
        γ in the residual, λ of the sum.
    decay : float or None
        By what the sum is multiplied a step; γλ if None.
    rewards, next_values : callable
        What is made of the rewards; of the values to get those of the next state. Both take the
        mask.
    over : callable
        What is made of the mask: where the sum runs.
    after : callable
        What is made of the sum once it is there; takes values and the mask.
    """

    gamma: float
    lam: float
    decay: float | None = None
    rewards: Callable[..., Any] = keep
    next_values: Callable[..., Any] | None = None
    over: Callable[..., Any] = lambda mask: mask
    after: Callable[..., Any] = lambda found, *_: found

    def __call__(self, rewards: Any, values: Any, mask: Any) -> Any:
        """Return the advantages."""
        xp, mask = namespace(rewards), as_mask(mask, rewards.shape)
        gained, over = self.rewards(rewards, mask), self.over(mask)
        following = (self.next_values or _following)(values, mask)
        decay = self.gamma * self.lam if self.decay is None else self.decay
        running, backwards = xp.zeros_like(rewards[:, 0]), []
        for t in reversed(range(rewards.shape[1])):
            delta = gained[:, t] + self.gamma * following[:, t] - values[:, t]
            running = xp.where(over[:, t], delta + decay * running, running)
            backwards.append(running)
        return self.after(xp.stack(backwards[::-1], axis=-1), values, mask)


def _following(values: Any, mask: Any) -> Any:
    """Value of the next state that counts; 0 after the last."""
    xp = namespace(values)
    running, backwards = xp.zeros_like(values[:, 0]), []
    for t in reversed(range(values.shape[1])):
        backwards.append(running)
        running = xp.where(mask[:, t], values[:, t], running)
    return xp.stack(backwards[::-1], axis=-1)


def _shifted(values: Any, by: int) -> Any:
    """Return the same one place later, or earlier; 0 comes in."""
    xp = namespace(values)
    none = xp.zeros_like(values[:, :1])
    if by > 0:
        return xp.concat([none, values[:, :-1]], axis=1)
    return xp.concat([values[:, 1:], none], axis=1)


def _time_examples() -> tuple[Example, ...]:
    chance = np.random.default_rng(17)
    ragged = np.arange(5) < np.array([[5], [2], [3]])
    late = ~(np.arange(5) < np.array([[1], [2], [0]])) & (np.arange(5) < np.array([[5], [4], [3]]))
    gap = np.array([[1, 1, 0, 1, 1], [1, 0, 0, 1, 1]], dtype=bool)

    def make(name: str, mask: Any, padding: float | None = 0.0) -> Example:
        shape = mask.shape
        rewards, values = chance.normal(size=shape), chance.normal(size=shape)
        if padding is not None:
            rewards, values = (np.where(mask, x, padding) for x in (rewards, values))
        return Example(name, {"rewards": rewards, "values": values, "mask": mask}, shape)

    end = make("a reward at the end alone", np.ones((2, 4), dtype=bool))
    alone = end.given["rewards"] * (np.arange(4) == 3)
    return (
        make("one token", np.ones((1, 1), dtype=bool)),
        replace(end, given={**end.given, "rewards": alone}),
        make("a reward at every token", np.ones((2, 4), dtype=bool)),
        make("completions of several lengths", ragged),
        make("numbers on padding", ragged, None),
        make("after a prompt", late, None),
        make("with tokens of a tool in between", gap, None),
        make("garbage on padding", ragged, np.nan),
    )


def _first_gap(mask: Any) -> Any:
    """Where a run of true ends."""
    return mask & ~_shifted(mask, -1)


TIME_FAULTS = (
    Fault(
        "γ is left out",
        "late rewards count in full",
        "returns above what the discount allows",
        lambda asked: {"gamma": 1.0, "decay": asked[1]} if asked[0] != 1 else {},
    ),
    Fault(
        "γ is left out of the sum of residuals",
        "the advantage looks further ahead than its λ says",
        "nothing to see by eye",
        lambda asked: {"decay": asked[1]} if asked[0] != 1 and asked[1] != 0 else {},
    ),
    Fault(
        "λ is left out",
        "no bias, and the whole noise of the return",
        "noisy advantages; they equal return less value",
        lambda asked: {"lam": 1.0} if asked[1] != 1 else {},
    ),
    Fault(
        "the residual of one step is taken alone",
        "with a reward at the end, early tokens learn from the critic alone",
        "advantages near 0 on all but the last token",
        lambda asked: {"lam": 0.0} if asked[0] * asked[1] != 0 else {},
    ),
    Fault(
        "rewards come one token late",
        "the last reward is lost, each token is paid for the one before it",
        "a single token has no reward",
        lambda _: {"rewards": lambda rewards, mask: _shifted(keep(rewards, mask), 1)},
    ),
    Fault(
        "rewards come one token early",
        "the last token is paid for nothing, the one before it for both",
        "a single token has no reward",
        lambda _: {"rewards": lambda rewards, mask: _shifted(keep(rewards, mask), -1)},
    ),
    Fault(
        "the whole reward stands at every token",
        "early tokens are paid many times over: long answers win",
        "returns that grow with the length; completions get longer",
        lambda _: {
            "rewards": lambda rewards, mask: (
                keep(rewards, mask) * 0
                + namespace(rewards).sum(keep(rewards, mask), axis=1, keepdims=True)
            )
        },
    ),
    Fault(
        "the value of the same state is taken for the next one",
        "the advantage holds no news: with γ = 1 it is the reward",
        "advantages that do not depend on the critic",
        lambda _: {"next_values": lambda values, _: values},
    ),
    Fault(
        "it bootstraps beyond the end: the value of padding is the last token's next",
        "the end of an answer is worth what the critic says of padding",
        "advantages change with what stands on padding",
        lambda _: {"next_values": lambda values, _: _shifted(values, -1)},
    ),
    Fault(
        "it bootstraps from the last value",
        "the end of an answer is worth what the state before it was",
        "advantages of last tokens that do not depend on the critic",
        lambda _: {
            "next_values": lambda values, mask: namespace(values).where(
                _first_gap(mask) & (_following(values, mask) == 0),
                values,
                _following(values, mask),
            )
        },
    ),
    Fault(
        "the sum runs across the end, over padding too",
        "residuals of padding leak into every token",
        "advantages change with what stands on padding",
        lambda _: {
            "over": lambda mask: mask | ~mask,
            "rewards": lambda rewards, _: rewards,
            "next_values": lambda values, _: _shifted(values, -1),
        },
    ),
    Fault(
        "returns are taken for advantages",
        "without the baseline every good answer pushes all its tokens up",
        "advantages whose mean is far from 0",
        lambda _: {"after": lambda found, values, _: found + values},
    ),
    Fault(
        "advantages are whitened",
        "none: it is an option of several libraries, made after this step",
        "a mean of 0 and a deviation of 1",
        lambda _: {"after": lambda found, _, mask: _whiten(found, mask)},
        convention=True,
    ),
    Fault(
        "the sign is turned round: value less return",
        "training makes good answers rarer",
        "the reward falls from the first batches on",
        lambda _: {"after": lambda found, *_: -found},
    ),
)
"""What is known to go wrong in advantages over time."""


def _whiten(found: Any, mask: Any) -> Any:
    return whiten(keep(found, mask), mask)


def _gae(gamma: float, lam: float, rewards: Any, values: Any, mask: Any) -> Any:
    return gae(rewards, values, mask, gamma, lam)[0]


@cache
def over_time(gamma: float, lam: float) -> Subject:
    """Return what generalised advantage estimation is checked for."""
    return Subject(
        title=f"advantages with γ = {gamma:g} and λ = {lam:g}",
        right=partial(_gae, gamma, lam),
        build=partial(replace, Time(gamma, lam)),
        faults=TIME_FAULTS,
        asked=(gamma, lam),
        examples=_time_examples(),
    )


# --- over groups ---


@dataclass(frozen=True)
class Group:
    """An advantage over the completions of a prompt, taken apart.

    Attributes
    ----------
    regroup : callable
        What is made of the rewards first, and its inverse afterwards.
    centre : callable
        Baseline of each completion.
    scale : callable
        What the difference is divided by; takes rewards and what is left of them.
    factor : float
        What all is multiplied by.
    """

    centre: Callable[..., Any]
    scale: Callable[..., Any]
    regroup: Callable[..., Any] = lambda rewards: (rewards, lambda found: found)
    factor: float = 1.0

    def __call__(self, rewards: Any) -> Any:
        """Return the advantages."""
        rewards, back = self.regroup(rewards)
        centred = rewards - self.centre(rewards)
        return self.factor * back(centred / self.scale(rewards, centred))


def _own_mean(rewards: Any) -> Any:
    return namespace(rewards).mean(rewards, axis=-1, keepdims=True)


def _others_mean(rewards: Any) -> Any:
    xp = namespace(rewards)
    return (xp.sum(rewards, axis=-1, keepdims=True) - rewards) / (rewards.shape[-1] - 1)


def _batch_mean(rewards: Any) -> Any:
    return namespace(rewards).mean(rewards)


def _no_scale(*_: Any) -> float:
    return 1.0


def _spread(ddof: int, epsilon: float = 1e-4, within: float = 0.0, safe: bool = True) -> Any:
    """Deviation of a group, with ε added to it, or within the root."""

    def scale(rewards: Any, centred: Any) -> Any:
        xp = namespace(rewards)
        size = rewards.shape[-1] - ddof
        found = (xp.sum(centred**2, axis=-1, keepdims=True) / size + within) ** 0.5 + epsilon
        every = xp.ones_like(rewards, dtype=xp.bool)
        equal = alike(rewards, every, axis=-1)
        return xp.where(equal, 1, found) if safe else found

    return scale


def _mean_scale(rewards: Any, _: Any) -> Any:
    xp, mean = namespace(rewards), _own_mean(rewards)
    return xp.where(mean == 0, 1, mean)


_PARTS: Mapping[str, Group] = {
    "batch_mean": Group(_batch_mean, _no_scale),
    "leave_one_out": Group(_others_mean, _no_scale),
    "group_mean": Group(_own_mean, _no_scale),
    "group_std": Group(_own_mean, _spread(1)),
    "mean_relative": Group(_own_mean, _mean_scale),
}


def _for(*kinds: str, **change: Any) -> Callable[[str], Mapping[str, Any]]:
    return lambda kind: change if kind in kinds else {}


def _but(*kinds: str, **change: Any) -> Callable[[str], Mapping[str, Any]]:
    return lambda kind: change if kind not in kinds else {}


def _mixed(rewards: Any) -> Any:
    """Read (prompts, completions) as if the completions of a prompt stood far apart."""
    xp, shape = namespace(rewards), rewards.shape
    other = xp.reshape(rewards, (shape[1], shape[0])).T
    return other, lambda found: xp.reshape(found.T, shape)


GROUP_FAULTS = (
    Fault(
        "the mean is the batch's, not the group's",
        "completions of easy prompts all look good, those of hard ones all bad",
        "groups whose advantages do not sum to 0",
        _but("batch_mean", "mean_relative", centre=_batch_mean),
    ),
    Fault(
        "the mean is the group's, not the batch's",
        "none that is known to hurt: the baseline knows the prompt",
        "each group's advantages sum to 0",
        _for("batch_mean", centre=_own_mean),
    ),
    Fault(
        "the group's mean includes the completion itself",
        "advantages, and the gradient, are shorter by (G − 1)/G",
        "nothing to see by eye; the learning rate could make up for it",
        _for("leave_one_out", centre=_own_mean),
    ),
    Fault(
        "the mean leaves the completion itself out",
        "advantages are longer by G/(G − 1)",
        "nothing to see by eye; the learning rate could make up for it",
        _for("group_mean", "group_std", "mean_relative", centre=_others_mean),
    ),
    Fault(
        "rewards are not centred",
        "every rewarded completion is pushed up, however common it is",
        "advantages whose mean is far from 0",
        lambda _: {"centre": lambda rewards: rewards * 0},
    ),
    Fault(
        "the difference is not divided by the deviation",
        "groups with a large spread count for more",
        "advantages that are not of size 1",
        _for("group_std", scale=_no_scale),
    ),
    Fault(
        "the difference is divided by the group's deviation",
        "groups that almost all agree count for as much as those that are split",
        "advantages of size 1 whatever the rewards",
        _but("group_std", scale=_spread(1)),
    ),
    Fault(
        "the deviation is the batch's, not the group's",
        "groups with a large spread count for more",
        "advantages of single groups that are not of size 1",
        _for(
            "group_std",
            scale=lambda rewards, centred: (
                deviation(centred, rewards.shape[0] * rewards.shape[1] - 1) + 1e-4
            ),
        ),
    ),
    Fault(
        "the variance is divided by, not its root",
        "the scale of the rewards matters again, upside down",
        "advantages that halve when rewards are doubled",
        _for("group_std", scale=lambda *given: _spread(1, 0)(*given) ** 2 + 1e-4),
    ),
    Fault(
        "a deviation of 0 is divided by",
        "a group of equal rewards gives NaN, and the batch is lost",
        "NaN losses once a prompt is always, or never, solved",
        _for("group_std", scale=_spread(1, 0, safe=False)),
    ),
    Fault(
        "completions of different prompts are taken for one group",
        "each is compared with answers to other questions",
        "groups whose advantages do not sum to 0",
        _but("batch_mean", regroup=_mixed),
    ),
    Fault(
        "the sign is turned round: mean less reward",
        "training makes good answers rarer",
        "the reward falls from the first batches on",
        lambda _: {"factor": -1.0},
    ),
    Fault(
        "the deviation is that of a population (divided by G), not of a sample (G − 1)",
        "advantages are longer by the root of G/(G − 1)",
        "none: NumPy's default, where PyTorch's is the sample's",
        _for("group_std", scale=_spread(0)),
        convention=True,
    ),
    Fault(
        "ε is 1e-6",
        "none, unless rewards are almost equal",
        "none",
        _for("group_std", scale=_spread(1, 1e-6)),
        convention=True,
    ),
    Fault(
        "ε is 1e-8",
        "none, unless rewards are almost equal",
        "none",
        _for("group_std", scale=_spread(1, 1e-8)),
        convention=True,
    ),
    Fault(
        "ε is added to the variance, not to its root",
        "none, unless rewards are almost equal",
        "none",
        _for("group_std", scale=_spread(1, 0, within=1e-8)),
        convention=True,
    ),
)
"""What is known to go wrong in advantages over groups."""


def _group_examples(kind: str) -> tuple[Example, ...]:
    chance = np.random.default_rng(19)

    def make(name: str, rewards: Any) -> Example:
        rewards = np.asarray(rewards, dtype=np.float64)
        return Example(name, {"rewards": rewards}, rewards.shape)

    # Scaled by the mean, rewards are 0 or 1.
    few = (chance.random((3, 4)) < 0.5).astype(float) + np.eye(3, 4)
    wide = few.clip(0, 1) if kind == "mean_relative" else chance.normal(1, 2, (3, 4))
    return (
        make("two completions", [[1, 0]]),
        make("one good completion of four", [[1, 0, 0, 0]]),
        make("two prompts, of which one is easy", [[1, 1, 1, 0], [0, 0, 1, 0]]),
        make("a wide range of rewards" if kind != "mean_relative" else "three prompts", wide),
        make("a group of equal rewards", [[1, 1, 1, 1], [0, 1, 0, 1]]),
        make("nothing solved", [[0, 0, 0, 0], [0, 1, 0, 0]]),
    )


@cache
def over_groups(row: Algorithm) -> Subject:
    """Return what an advantage over groups is checked for."""
    kind = row.advantage
    return Subject(
        title=f"advantages of {row.name} ({kind})",
        right=partial(completion_advantages, row),
        build=partial(replace, _PARTS[kind]),
        faults=GROUP_FAULTS,
        asked=kind,
        examples=_group_examples(kind),
    )
