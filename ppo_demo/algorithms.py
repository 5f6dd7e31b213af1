"""Every variant of the field as a row of one table, and one loss for all of them.

An `Algorithm` is data: which advantage, which ratio, which clip rule, which mean, and where the
KL term stands. A new one is a row with other fields::

    from dataclasses import replace

    mine = replace(ALGORITHMS["grpo"], name="mine", aggregation="token", clip_range_high=0.3)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from ppo_demo._arrays import Array, as_mask, keep, namespace, require, require_floats, require_shape
from ppo_demo.advantages import group_relative, leave_one_out
from ppo_demo.aggregation import Aggregation, aggregate
from ppo_demo.divergences import Estimator, kl_estimate
from ppo_demo.surrogates import (
    clipped_surrogate,
    clipped_weight_surrogate,
    dual_clip_surrogate,
    gamma_weight_surrogate,
    importance_weight,
    probability_ratio,
    sequence_ratio,
    soft_gate_surrogate,
)

Advantage: TypeAlias = Literal[
    "gae", "batch_mean", "leave_one_out", "group_mean", "group_std", "batch_std", "mean_relative"
]
Ratio: TypeAlias = Literal["none", "token", "sequence", "product"]
Clip: TypeAlias = Literal["none", "ppo", "dual", "weight", "soft", "gamma"]
KLPlace: TypeAlias = Literal["none", "reward", "loss"]

CLIP_FIELDS: Mapping[str, tuple[set[str], set[str]]] = MappingProxyType(
    {
        "none": (set(), set()),
        "ppo": ({"clip_range"}, {"clip_range_high"}),
        "dual": ({"clip_range", "dual_clip"}, {"clip_range_high"}),
        "weight": ({"max_weight"}, set()),
        "soft": ({"temperature_positive", "temperature_negative"}, set()),
        "gamma": ({"shape_positive", "shape_negative"}, set()),
    }
)
"""Of each clip rule, the fields that it needs and those that it may have."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One variant of the policy-gradient step.

    Attributes
    ----------
    name, paper : str
        What it is called, and the key of its source in the book's bibliography.
    advantage : str
        ``"gae"`` (needs a value head), or a function of the rewards of a prompt's completions:
        ``"batch_mean"`` (less the mean of the batch), ``"leave_one_out"``, ``"group_mean"``,
        ``"group_std"``, ``"batch_std"``, ``"mean_relative"``; see `ppo_demo.advantages`.
    ratio : {"none", "token", "sequence", "product"}
        Importance ratio: none (the gradient of log π), per token, or per completion, as the
        geometric mean or the product of its tokens' ratios.
    clip : {"none", "ppo", "dual", "weight", "soft", "gamma"}
        Clip rule; see `ppo_demo.surrogates`.
    aggregation : {"token", "sequence", "fixed", "sum"}
        How per-token losses become one; see `aggregate`.
    kl : {"none", "reward", "loss"}
        Where the KL term stands. In the reward it changes the advantages, so it is the caller's.
    clip_range, clip_range_high, dual_clip, max_weight : float, optional
    temperature_positive, temperature_negative : float, optional
    shape_positive, shape_negative : (float, float), optional
        Numbers of the clip rule; given if and only if it uses them.
    kl_estimator : {"k1", "k2", "k3"}, optional
        For a KL term in the loss, and needed there.
    kl_weighted : bool
        Multiply the estimate by the ratio, so that its gradient is the reverse KL's.

    Raises
    ------
    ValueError
        If a field has a value that is unknown, or fields contradict each other.
    """

    name: str
    paper: str
    advantage: Advantage
    ratio: Ratio
    clip: Clip
    aggregation: Aggregation
    kl: KLPlace = "none"
    clip_range: float | None = None
    clip_range_high: float | None = None
    dual_clip: float | None = None
    max_weight: float | None = None
    temperature_positive: float | None = None
    temperature_negative: float | None = None
    shape_positive: tuple[float, float] | None = None
    shape_negative: tuple[float, float] | None = None
    kl_estimator: Estimator | None = None
    kl_weighted: bool = False

    def __post_init__(self) -> None:
        for name, kind in (
            ("advantage", Advantage),
            ("ratio", Ratio),
            ("clip", Clip),
            ("aggregation", Aggregation),
            ("kl", KLPlace),
        ):
            value = getattr(self, name)
            self._refuse(value not in get_args(kind), name, f"one of {get_args(kind)}")
        needed, allowed = CLIP_FIELDS[self.clip]
        for field in sorted({f for pair in CLIP_FIELDS.values() for s in pair for f in s}):
            given = getattr(self, field) is not None
            self._refuse(field in needed and not given, field, f"given for clip={self.clip!r}")
            unused = given and field not in needed | allowed
            self._refuse(unused, field, f"left out for clip={self.clip!r}, which does not use it")
        without = self.ratio == "none" and self.clip != "none"
        self._refuse(without, "ratio", f"other than 'none' for clip={self.clip!r} to act on")
        whole = self.clip == "gamma" and self.ratio != "product"
        self._refuse(whole, "ratio", "'product' for clip='gamma', a weight of whole completions")
        for field in ("clip_range", "clip_range_high", "temperature_positive"):
            value = getattr(self, field)
            self._refuse(value is not None and not value > 0, field, "above 0")
        in_loss = self.kl == "loss"
        estimated = self.kl_estimator is not None
        self._refuse(in_loss and not estimated, "kl_estimator", "given for kl='loss'")
        self._refuse(not in_loss and estimated, "kl_estimator", "left out unless kl='loss'")
        self._refuse(not in_loss and self.kl_weighted, "kl_weighted", "left out unless kl='loss'")
        self._refuse(
            self.kl_estimator == "k1" and not self.kl_weighted,
            "kl_estimator",
            "'k2', 'k3' or weighted by the ratio: as a loss, k1 has no gradient in expectation",
        )
        self._refuse(
            self.kl_weighted and self.ratio == "none", "kl_weighted", "left out for ratio='none'"
        )

    def _refuse(self, fault: bool, field: str, allowed: str) -> None:
        if fault:
            value = getattr(self, field)
            raise ValueError(f"{field} of algorithm {self.name!r} must be {allowed}, got {value!r}")


_PPO_CLIP: dict[str, Any] = {"ratio": "token", "clip": "ppo", "clip_range": 0.2}
_K3: dict[str, Any] = {"kl": "loss", "kl_estimator": "k3"}
_ROWS = (
    Algorithm(
        name="REINFORCE",
        paper="williams1992reinforce",
        advantage="batch_mean",
        ratio="none",
        clip="none",
        aggregation="sum",
        kl="reward",
    ),
    Algorithm(
        name="RLOO",
        paper="ahmadian2024rloo",
        advantage="leave_one_out",
        ratio="none",
        clip="none",
        aggregation="sum",
        kl="reward",
    ),
    Algorithm(
        name="PPO",
        paper="schulman2017ppo",
        advantage="gae",
        aggregation="token",
        kl="reward",
        **_PPO_CLIP,
    ),
    Algorithm(
        name="GRPO",
        paper="shao2024deepseekmath",
        advantage="group_std",
        aggregation="sequence",
        **_PPO_CLIP,
        **_K3,
    ),
    Algorithm(
        name="Dr. GRPO",
        paper="liu2025drgrpo",
        advantage="group_mean",
        aggregation="fixed",
        **_PPO_CLIP,
    ),
    Algorithm(
        name="DAPO",
        paper="yu2025dapo",
        advantage="group_std",
        aggregation="token",
        clip_range_high=0.28,
        **_PPO_CLIP,
    ),
    Algorithm(
        name="GSPO",
        paper="zheng2025gspo",
        advantage="group_std",
        ratio="sequence",
        clip="ppo",
        clip_range=3e-4,
        clip_range_high=4e-4,
        aggregation="sequence",
    ),
    Algorithm(
        name="LUSPO",
        paper="liu2026luspo",
        advantage="group_std",
        ratio="sequence",
        clip="ppo",
        clip_range=3e-4,
        clip_range_high=4e-4,
        aggregation="sum",
    ),
    Algorithm(
        name="CISPO",
        paper="minimax2025m1",
        advantage="group_std",
        ratio="token",
        clip="weight",
        max_weight=5.0,
        aggregation="token",
    ),
    Algorithm(
        name="SAPO",
        paper="gao2025sapo",
        advantage="group_std",
        ratio="token",
        clip="soft",
        temperature_positive=1.0,
        temperature_negative=1.05,
        aggregation="sequence",
    ),
    Algorithm(
        name="VESPO",
        paper="shen2026vespo",
        advantage="group_std",
        ratio="product",
        clip="gamma",
        shape_positive=(2.0, 3.0),
        shape_negative=(3.0, 2.0),
        aggregation="token",
    ),
    Algorithm(
        name="MaxRL",
        paper="tajwar2026maxrl",
        advantage="mean_relative",
        aggregation="token",
        **_PPO_CLIP,
    ),
)

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {row.name.lower().replace(". ", "_"): row for row in _ROWS}
)
"""The field's variants by their lower-case name: ``"reinforce"``, ``"ppo"``, ``"dr_grpo"`` …"""

_ESTIMATORS: Mapping[str, Callable[[Array, Array | None], Array]] = MappingProxyType(
    {
        "leave_one_out": leave_one_out,
        "group_mean": lambda r, v: group_relative(r, v, scale="none"),
        "group_std": lambda r, v: group_relative(r, v, scale="group"),
        "batch_std": lambda r, v: group_relative(r, v, scale="batch"),
        "mean_relative": lambda r, v: group_relative(r, v, scale="mean"),
    }
)


def completion_advantages(
    algorithm: Algorithm, rewards: Array, valid: Array | None = None
) -> Array:
    """Advantage of each completion, by the algorithm's estimator.

    Parameters
    ----------
    algorithm : Algorithm
        Any whose advantage is not ``"gae"``.
    rewards : array, shape (prompts, completions)
        One reward per completion.
    valid : array of bool or 0/1, same shape, optional
        False for completions to leave out.

    Returns
    -------
    array, same shape
        The advantages.

    Raises
    ------
    ValueError
        If the algorithm needs a value head, or its estimator more completions.
    """
    kind = algorithm.advantage
    require("advantage", kind, kind != "gae", "one that needs no value head: use `gae` itself")
    if kind == "batch_mean":
        xp = namespace(rewards)
        flat = None if valid is None else xp.reshape(valid, (1, -1))
        centred = group_relative(xp.reshape(rewards, (1, -1)), flat, scale="none")
        return xp.reshape(centred, rewards.shape)
    return _ESTIMATORS[kind](rewards, valid)


def policy_objective(
    algorithm: Algorithm, log_probs: Array, old_log_probs: Array, advantages: Array, mask: Array
) -> tuple[Array, Array | None]:
    """Objective of each token, before the mean, and the ratio that it was computed with.

    Parameters
    ----------
    algorithm, log_probs, old_log_probs, advantages, mask
        As for `policy_loss`.

    Returns
    -------
    objective : array, shape (completions, time)
        To be maximised.
    ratio : array, shape (completions, time) or (completions, 1), or None
        The importance ratio, None where the algorithm has none.
    """
    xp = namespace(log_probs)
    a: Any = algorithm  # its fields are there when its clip rule needs them
    ratios: Mapping[str, Callable[[], Array | None]] = {
        "none": lambda: None,
        "token": lambda: probability_ratio(log_probs, old_log_probs, mask),
        "sequence": lambda: sequence_ratio(log_probs, old_log_probs, mask),
        "product": lambda: sequence_ratio(log_probs, old_log_probs, mask, normalize=False),
    }
    ratio = ratios[a.ratio]()
    rules: Mapping[str, Callable[..., Array]] = {
        "none": lambda r, adv: adv * (log_probs if r is None else r),
        "ppo": lambda r, adv: clipped_surrogate(r, adv, a.clip_range, a.clip_range_high),
        "dual": lambda r, adv: dual_clip_surrogate(
            r, adv, a.clip_range, a.dual_clip, a.clip_range_high
        ),
        "weight": lambda r, adv: clipped_weight_surrogate(r, adv, log_probs, a.max_weight),
        "soft": lambda r, adv: soft_gate_surrogate(
            r, adv, a.temperature_positive, a.temperature_negative
        ),
        "gamma": lambda r, adv: gamma_weight_surrogate(
            r, adv, log_probs, a.shape_positive, a.shape_negative
        ),
    }
    objective = rules[a.clip](ratio, advantages)
    # A ratio of whole completions stands once; every token of the completion shares it.
    return objective + xp.zeros_like(log_probs), ratio


def policy_loss(
    algorithm: Algorithm,
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    *,
    ref_log_probs: Array | None = None,
    kl_weight: float = 0.0,
    sampler_log_probs: Array | None = None,
    max_weight: float = 2.0,
    length: float | None = None,
) -> Array:
    """Loss of any algorithm on a batch of completions.

    Parameters
    ----------
    algorithm : Algorithm
        A row of `ALGORITHMS` or one of your own.
    log_probs, old_log_probs : array, shape (completions, time)
        Log-probabilities of the sampled tokens under the policy that is trained and under the
        one that sampled them.
    advantages : array, shape (completions, time) or (completions, 1)
        One per token, or one per completion.
    mask : array of bool or 0/1, shape (completions, time)
        True on the completions' tokens. What stands elsewhere, NaN and infinities included,
        reaches neither the loss nor its gradient.
    ref_log_probs : array, shape (completions, time), optional
        Under the reference; for a KL term in the loss, and needed there if it has weight.
    kl_weight : float
        β of the KL term in the loss, at least 0.
    sampler_log_probs : array, shape (completions, time), optional
        As the sampler reported them, where it is not quite the old policy; each token's loss is
        then weighted by `importance_weight`.
    max_weight : float
        Largest such weight.
    length : float, optional
        For ``aggregation="fixed"``, and needed there: usually the limit on a completion.

    Returns
    -------
    scalar array
        The loss, to be minimised.

    Raises
    ------
    ValueError
        If shapes differ, no token counts, or an argument is missing or contradicts the
        algorithm.
    TypeError
        If an array holds integers where real numbers belong.
    """
    mask = as_mask(mask, log_probs.shape)
    require_floats(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    require_shape(log_probs.shape, old_log_probs=old_log_probs)
    rows = (log_probs.shape[0], 1)
    shapes = (tuple(log_probs.shape), rows)
    shape = tuple(advantages.shape)
    require("advantages", shape, shape in shapes, f"of shape {shapes[0]} or {rows}")
    require("kl_weight", kl_weight, kl_weight >= 0, "at least 0")
    if kl_weight > 0 and algorithm.kl != "loss":
        raise ValueError(
            f"kl_weight must be 0 for {algorithm.name}, whose KL term is not in the loss "
            f"(kl={algorithm.kl!r}), got {kl_weight!r}"
        )
    log_probs, old_log_probs = keep(log_probs, mask), keep(old_log_probs, mask)
    if shape == shapes[0]:
        advantages = keep(advantages, mask)
    objective, ratio = policy_objective(algorithm, log_probs, old_log_probs, advantages, mask)
    if sampler_log_probs is not None:
        require_shape(log_probs.shape, sampler_log_probs=sampler_log_probs)
        sampled = keep(sampler_log_probs, mask)
        objective = objective * importance_weight(old_log_probs, sampled, max_weight)
    losses = -objective
    if kl_weight > 0:
        if ref_log_probs is None:
            raise ValueError("ref_log_probs must be given for a KL term in the loss, got None")
        estimator: Any = algorithm.kl_estimator
        weight = ratio if algorithm.kl_weighted else None
        kl = kl_estimate(log_probs, ref_log_probs, estimator, mask, weight)
        losses = losses + kl_weight * kl
    return aggregate(losses, mask, algorithm.aggregation, length=length)
