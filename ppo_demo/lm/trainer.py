"""One trainer for every row of `ALGORITHMS`: sample, score, take a few epochs of steps, repeat."""

import copy
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ppo_demo.advantages import gae, whiten
from ppo_demo.aggregation import masked_mean
from ppo_demo.algorithms import ALGORITHMS, Algorithm, completion_advantages, policy_loss
from ppo_demo.diagnostics import approx_kl, clip_fraction, explained_variance
from ppo_demo.divergences import adaptive_kl_weight, entropy, kl_estimate
from ppo_demo.lm.corpus import COMPLETION_LENGTH, MAX_LENGTH, PROMPT_LENGTH, gold_reward, prompts
from ppo_demo.lm.corpus import rule_reward as score_by_rule
from ppo_demo.lm.model import PolicyValueModel
from ppo_demo.lm.pretrain import RewardModel
from ppo_demo.lm.rollout import Completions, sample
from ppo_demo.lm.step import next_token_log_probs
from ppo_demo.surrogates import probability_ratio, value_loss

Reward = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run.

    Attributes
    ----------
    algorithm : str
        Key of `ALGORITHMS`.
    steps : int
        Batches.
    seed : int
        Fixes every sample and every order.
    batch_size : int
        Completions a batch.
    group_size : int
        Completions a prompt, for algorithms that compare them; divides the batch.
    learning_rate : float
        Of Adam.
    epochs, minibatches : int
        Passes over a batch, and gradient steps in each.
    gamma, lam : float
        γ and λ of the advantage estimation.
    kl_weight : float
        β, where the algorithm has a KL term; else there is none.
    kl_target : float, optional
        Adapt β towards this KL a completion, in nats.
    kl_horizon : int
        Completions over which an adapted β may change by a fifth.
    entropy_weight, value_weight : float
        Weights of the entropy bonus and of the value loss.
    value_clip : float, optional
        How far a value may move in a batch and still have a gradient.
    whiten_rewards, whiten_advantages : bool
        Whiten scores of a batch; whiten advantages that come from a value head.
    max_grad_norm : float
        A longer gradient is scaled down to this.
    target_kl : float, optional
        End a batch's steps once the approximate KL from its start, in nats a token, is above this.
    temperature : float
        Of the policy, when it samples and when it is trained.
    reward : {"model", "rule"}
        The reward model, or the rule that gives 0 or 1.
    packing : bool
        Put the completions of a minibatch end to end, without padding.
    clip_range : float, optional
        In the place of the algorithm's own ε.

    Raises
    ------
    ValueError
        If a setting is out of range or settings contradict each other. The message names the
        field, the value and what is allowed.
    """

    algorithm: str = "ppo"
    steps: int = 60
    seed: int = 0
    batch_size: int = 128
    group_size: int = 8
    learning_rate: float = 1e-3
    epochs: int = 4
    minibatches: int = 2
    gamma: float = 1.0
    lam: float = 0.95
    kl_weight: float = 0.05
    kl_target: float | None = None
    kl_horizon: int = 1280
    entropy_weight: float = 0.0
    value_weight: float = 0.5
    value_clip: float | None = None
    whiten_rewards: bool = False
    whiten_advantages: bool = True
    max_grad_norm: float = 1.0
    target_kl: float | None = None
    temperature: float = 1.0
    reward: Literal["model", "rule"] = "model"
    packing: bool = False
    clip_range: float | None = None

    def __post_init__(self) -> None:
        self._check("algorithm", self.algorithm in ALGORITHMS, f"one of {sorted(ALGORITHMS)}")
        for name in ("steps", "batch_size", "group_size", "epochs", "minibatches", "kl_horizon"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("learning_rate", "max_grad_norm", "temperature"):
            value = getattr(self, name)
            self._check(name, math.isfinite(value) and value > 0, "above 0")
        for name in ("kl_weight", "entropy_weight", "value_weight"):
            self._check(name, getattr(self, name) >= 0, "at least 0")
        for name in ("gamma", "lam"):
            self._check(name, 0 <= getattr(self, name) <= 1, "from 0 to 1")
        for name in ("kl_target", "value_clip", "target_kl", "clip_range"):
            value = getattr(self, name)
            self._check(name, value is None or value > 0, "above 0 or left out")
        self._check("reward", self.reward in ("model", "rule"), "'model' or 'rule'")
        batch = self.batch_size
        divides = batch % self.group_size == 0
        self._check("group_size", divides, f"a divisor of batch_size={batch}")
        self._check(
            "minibatches", batch % self.minibatches == 0, f"a divisor of batch_size={batch}"
        )
        compares = ALGORITHMS[self.algorithm].advantage not in ("gae", "batch_mean")
        alone = compares and self.group_size == 1
        self._check("group_size", not alone, f"at least 2 for {self.algorithm!r}")
        relative = ALGORITHMS[self.algorithm].advantage == "mean_relative"
        by_rule = self.reward == "rule"
        self._check("reward", by_rule or not relative, f"'rule' (0 or 1) for {self.algorithm!r}")
        clips = ALGORITHMS[self.algorithm].clip_range is not None
        self._check(
            "clip_range",
            self.clip_range is None or clips,
            f"left out for {self.algorithm!r}, which has none",
        )

    def _check(self, name: str, valid: bool, allowed: str) -> None:
        if not valid:
            raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    @property
    def row(self) -> Algorithm:
        """The algorithm with this run's clip range."""
        row = ALGORITHMS[self.algorithm]
        if self.clip_range is None:
            return row
        return replace(row, clip_range=self.clip_range, clip_range_high=None)


@dataclass
class Batch:
    """A scored batch; all but `tokens` is about the next token, shape (batch, time - 1)."""

    tokens: Tensor
    mask: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor
    advantages: Tensor
    returns: Tensor
    old_values: Tensor

    def rows(self, index: Tensor) -> "Batch":
        """Return some of its completions."""
        return Batch(**{name: value[index] for name, value in vars(self).items()})


class Trainer:
    """Trains a policy; holds all that a run needs to go on.

    Parameters
    ----------
    config : TrainConfig
        Settings.
    reference : PolicyValueModel
        The policy to start from, and to be held to; it is not changed.
    reward_model : callable
        Scores reviews, shape (batch, time), as a tensor of shape (batch,).
    algorithm : Algorithm, optional
        A row of your own in the place of the one that the settings name.
    """

    def __init__(
        self,
        config: TrainConfig,
        reference: PolicyValueModel,
        reward_model: Reward,
        algorithm: Algorithm | None = None,
    ) -> None:
        self.config = config
        self.row = config.row if algorithm is None else algorithm
        self.reference = reference
        self.proxy = reward_model
        self.policy = copy.deepcopy(reference)
        self.optimizer = torch.optim.Adam(
            self.policy.parameters(), lr=config.learning_rate, fused=True
        )
        self.generator = torch.Generator().manual_seed(config.seed)
        self.kl_weight = config.kl_weight if self.row.kl != "none" else 0.0
        self.history: list[dict[str, float]] = []

    # --- one batch ---

    def rollout(self) -> tuple[Batch, dict[str, float]]:
        """Sample a batch from the policy, score it and estimate its advantages."""
        c = self.config
        grouped = self.row.advantage not in ("gae", "batch_mean")
        each = c.group_size if grouped else 1
        asked = prompts(c.batch_size // each, self.generator).repeat_interleave(each, 0)
        written = sample(
            self.policy,
            asked,
            self.generator,
            max_tokens=COMPLETION_LENGTH,
            temperature=c.temperature,
        )
        with torch.no_grad():
            ref, _, _ = self._evaluate(self.reference, written.tokens)
            proxy = self.proxy(written.tokens)
            scores = score_by_rule(written.tokens) if self.config.reward == "rule" else proxy
        batch, kl = self._advantages(written, scores, ref)
        metrics = {
            "reward": proxy.mean().item(),
            "gold": gold_reward(written.tokens).mean().item(),
            "rule": score_by_rule(written.tokens).mean().item(),
            "kl": kl.mean().item(),
            "entropy": masked_mean(written.entropies, written.mask).item(),
            "length": written.lengths.float().mean().item(),
            "kl_weight": self.kl_weight,
        }
        if self.row.advantage == "gae":
            explained = explained_variance(batch.old_values, batch.returns, batch.mask)
            metrics["explained_variance"] = explained.item()
        return batch, metrics

    def _evaluate(
        self, model: PolicyValueModel, tokens: Tensor, *, entropies: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the next tokens, values, and entropies if asked for."""
        logits, values = model(tokens[:, :-1])
        logits = logits / self.config.temperature if self.config.temperature != 1 else logits
        spread = entropy(logits) if entropies else values
        return next_token_log_probs(logits, tokens), values, spread

    def _advantages(
        self, written: Completions, scores: Tensor, ref: Tensor
    ) -> tuple[Batch, Tensor]:
        c, mask, old, values = self.config, written.mask, written.log_probs, written.values
        per_token = kl_estimate(old, ref, "k1", mask)
        kl = per_token.sum(-1)
        if c.whiten_rewards:
            scores = whiten(scores, torch.ones_like(scores))
        penalty = self.kl_weight if self.row.kl == "reward" else 0.0
        if self.row.advantage == "gae":
            last = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))
            rewards = torch.where(last, scores[:, None], 0.0) - penalty * per_token
            advantages, returns = gae(rewards, values, mask, c.gamma, c.lam)
            if c.whiten_advantages:
                advantages = whiten(advantages, mask)
        else:
            totals = (scores - penalty * kl).view(-1, c.group_size)
            each = completion_advantages(self.row, totals).view(-1, 1)
            advantages = each.expand(mask.shape)
            returns = torch.zeros_like(values)
        return Batch(written.tokens, mask, old, ref, advantages, returns, values), kl

    def loss(self, batch: Batch, *, watch: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy loss, value loss and entropy bonus of some completions, and their metrics."""
        c, row = self.config, self.row
        bonus = c.entropy_weight > 0
        if c.packing:
            log_probs, values, spread = self._evaluate_packed(batch, entropies=bonus)
        else:
            log_probs, values, spread = self._evaluate(self.policy, batch.tokens, entropies=bonus)
        in_loss = row.kl == "loss" and self.kl_weight > 0
        loss = policy_loss(
            row,
            log_probs,
            batch.old_log_probs,
            batch.advantages,
            batch.mask,
            ref_log_probs=batch.ref_log_probs if in_loss else None,
            kl_weight=self.kl_weight if in_loss else 0.0,
            length=COMPLETION_LENGTH if row.aggregation == "fixed" else None,
        )
        metrics = {"policy_loss": loss.detach()}
        if row.advantage == "gae":
            old = batch.old_values if c.value_clip else None
            error = value_loss(values, batch.returns, old, c.value_clip, batch.mask)
            value = masked_mean(error, batch.mask)
            metrics["value_loss"] = value.detach()
            loss = loss + c.value_weight * value
        if bonus:
            loss = loss - c.entropy_weight * masked_mean(spread, batch.mask)
        if not watch:
            return loss, metrics
        with torch.no_grad():
            metrics["approx_kl"] = approx_kl(log_probs, batch.old_log_probs, batch.mask)
            if row.clip_range is not None:
                ratio = probability_ratio(log_probs, batch.old_log_probs, batch.mask)
                metrics["clip_fraction"] = clip_fraction(
                    ratio, batch.advantages, batch.mask, row.clip_range, row.clip_range_high
                )
        return loss, metrics

    def _evaluate_packed(self, batch: Batch, *, entropies: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Do as `_evaluate` with the completions end to end, so that padding costs nothing."""
        lengths = PROMPT_LENGTH - 1 + batch.mask.sum(-1)  # inputs whose outputs are used
        used = torch.arange(batch.mask.shape[1]) < lengths[:, None]
        logits, values = self.policy.packed(batch.tokens[:, :-1][used], lengths)
        if self.config.temperature != 1:
            logits = logits / self.config.temperature
        taken = batch.tokens[:, 1:][used]
        flat = logits.log_softmax(-1).gather(-1, taken[:, None]).squeeze(-1)

        def unpack(x: Tensor) -> Tensor:
            return torch.zeros_like(batch.old_log_probs).masked_scatter(used, x)

        spread = unpack(entropy(logits)) if entropies else unpack(values)
        return unpack(flat), unpack(values), spread

    def step(self) -> dict[str, float]:
        """Take one batch: sample, score, a few epochs of gradient steps. Returns its metrics."""
        c = self.config
        batch, metrics = self.rollout()
        seen: dict[str, list[Tensor]] = {}
        for _ in range(c.epochs):
            order = torch.randperm(c.batch_size, generator=self.generator)
            minibatches = order.split(c.batch_size // c.minibatches)
            for number, rows in enumerate(minibatches, 1):
                # How far the epoch has gone is seen at its end.
                loss, found = self.loss(batch.rows(rows), watch=number == c.minibatches)
                self.optimizer.zero_grad()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(self.policy.parameters(), c.max_grad_norm)
                self.optimizer.step()
                for name, value in {**found, "grad_norm": norm}.items():
                    seen.setdefault(name, []).append(value)
            if c.target_kl is not None and seen["approx_kl"][-1].item() > c.target_kl:
                break
        metrics |= {name: torch.stack(values).mean().item() for name, values in seen.items()}
        metrics["gradient_steps"] = float(len(seen["grad_norm"]))
        if c.kl_target is not None and self.row.kl != "none":
            self.kl_weight = adaptive_kl_weight(
                self.kl_weight,
                max(metrics["kl"], 0.0),
                target=c.kl_target,
                horizon=c.kl_horizon,
                samples=c.batch_size,
            )
        self.history.append(metrics)
        return metrics

    def run(self) -> Iterator[dict[str, float]]:
        """Take the batches that are left, one at a time; yields the metrics of each."""
        while len(self.history) < self.config.steps:
            yield self.step()

    # --- keeping it ---

    def state(self) -> dict[str, Any]:
        """Return all that a run needs to go on as if it had not stopped."""
        return {
            "config": asdict(self.config),
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "kl_weight": self.kl_weight,
            "history": self.history,
        }

    def save(self, path: Path) -> None:
        """Write a checkpoint; the file is whole, or the one before."""
        buffer = io.BytesIO()
        torch.save(self.state(), buffer)
        write_atomically(path, buffer.getvalue())

    def load(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises
        ------
        ValueError
            If it was written with other settings; more steps are no other setting.
        """
        state = torch.load(path, weights_only=True)
        mine, its = asdict(self.config), dict(state["config"])
        for name, value in mine.items():
            if name != "steps" and its[name] != value:
                raise ValueError(
                    f"{name} must be {its[name]!r} to go on from {path}, got {value!r}"
                )
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.kl_weight = state["kl_weight"]
        self.history = state["history"]


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file beside its place and move it there once it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    with draft.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(path)


def write_history(path: Path, config: TrainConfig, history: list[dict[str, float]]) -> None:
    """Write settings and metrics of a run as JSON."""
    text = json.dumps({"config": asdict(config), "history": history}, indent=1)
    write_atomically(path, text.encode())


def train(
    config: TrainConfig,
    reference: PolicyValueModel,
    reward_model: RewardModel | Reward,
    algorithm: Algorithm | None = None,
) -> Trainer:
    """Run a training from start to end.

    Parameters
    ----------
    config, reference, reward_model, algorithm
        As for `Trainer`.

    Returns
    -------
    Trainer
        With the trained ``policy`` and the ``history``.
    """
    trainer = Trainer(config, reference, reward_model, algorithm)
    for _ in trainer.run():
        pass
    return trainer


assert MAX_LENGTH == PROMPT_LENGTH + COMPLETION_LENGTH
