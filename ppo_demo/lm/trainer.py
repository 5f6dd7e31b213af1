"""One trainer for every row of `ALGORITHMS`: sample, score, take a few epochs of steps, repeat."""

import copy
import io
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ppo_demo._checks import at_least, finite, fraction, one_of, positive, require, whole
from ppo_demo.advantages import gae, whiten
from ppo_demo.aggregation import masked_mean
from ppo_demo.algorithms import ALGORITHMS
from ppo_demo.diagnostics import approx_kl, clip_fraction, explained_variance
from ppo_demo.divergences import adaptive_kl_weight, entropy, kl_estimate
from ppo_demo.lm.corpus import COMPLETION_LENGTH, gold_reward, prompts, rule_reward
from ppo_demo.lm.model import PolicyValueModel
from ppo_demo.lm.pretrain import RewardModel
from ppo_demo.lm.rollout import Completions, require_temperature, sample
from ppo_demo.lm.step import descend, next_token_log_probs, used_positions
from ppo_demo.losses import Algorithm, Batch, completion_advantages, losses
from ppo_demo.surrogates import Clip

Reward = Callable[[Tensor], Tensor]


class TrainingError(RuntimeError):
    """A run has left the numbers: something that it computed is infinite or no number."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run.

    Attributes
    ----------
    algorithm : str or Algorithm
        Key of `ALGORITHMS`, or a row of your own.
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
    adaptive_kl_target : float, optional
        Adapt β towards this KL a completion, in nats.
    adaptive_kl_horizon : int
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
    clip_range, clip_range_high : float, optional
        In the place of the algorithm's own; what is left out stays as it is.

    Raises
    ------
    ValueError
        If a setting is out of range or settings contradict each other. The message names the
        field, the value and what is allowed.
    """

    algorithm: str | Algorithm = "ppo"
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
    adaptive_kl_target: float | None = None
    adaptive_kl_horizon: int = 1280
    entropy_weight: float = 0.0
    value_weight: float = 0.5
    value_clip: float | None = None
    whiten_rewards: bool = False
    whiten_advantages: bool = True
    max_grad_norm: float = 1.0
    target_kl: float | None = None
    temperature: float = 1.0
    reward: Literal["model", "rule"] = "model"
    clip_range: float | None = None
    clip_range_high: float | None = None

    def __post_init__(self) -> None:
        def given(*names: str) -> dict[str, Any]:
            found = {name: getattr(self, name) for name in names}
            return {name: value for name, value in found.items() if value is not None}

        if not isinstance(self.algorithm, Algorithm):
            one_of(ALGORITHMS, algorithm=self.algorithm)
        one_of(("model", "rule"), reward=self.reward)
        counts = given("steps", "batch_size", "group_size", "epochs", "minibatches")
        counts |= given("adaptive_kl_horizon")
        whole(**counts, seed=self.seed)
        at_least(1, **counts)
        require("seed", self.seed, 0 <= self.seed < 2**63, "from 0 to 2**63 - 1")
        rates = given("learning_rate", "max_grad_norm", "temperature")
        optional = given("adaptive_kl_target", "value_clip", "target_kl")
        weights = given("kl_weight", "entropy_weight", "value_weight")
        positive(**rates, **optional)
        at_least(0, **weights)
        finite(**rates, **optional, **weights)
        require_temperature(self.temperature)
        fraction(gamma=self.gamma, lam=self.lam)
        row, batch, group = self.row, self.batch_size, self.group_size
        for name, size in given("group_size", "minibatches").items():
            require(name, size, batch % size == 0, f"a divisor of batch_size={batch}")
        alone = group == 1 and row.advantage not in ("gae", "batch_mean")
        require("group_size", group, not alone, f"at least 2 for {row.name}")
        unfit = row.advantage == "mean_relative" and self.reward != "rule"
        require("reward", self.reward, not unfit, f"'rule' (0 or 1) for {row.name}")

    @property
    def row(self) -> Algorithm:
        """The algorithm, with the clip range of these settings."""
        row = (
            self.algorithm if isinstance(self.algorithm, Algorithm) else ALGORITHMS[self.algorithm]
        )
        for name in ("clip_range", "clip_range_high"):
            value = getattr(self, name)
            if value is not None:
                clip: Any = row.clip
                clips = isinstance(clip, Clip)
                require(name, value, clips, f"left out for {row.name}, which has none")
                row = replace(row, clip=replace(clip, **{name: value}))
        return row

    def settings(self) -> dict[str, Any]:
        """Return all fields as plain values; an algorithm of your own as its text."""
        own = isinstance(self.algorithm, Algorithm)
        return vars(self) | ({"algorithm": repr(self.algorithm)} if own else {})


class Trainer:
    """Trains a policy; holds all that a run needs to go on.

    Parameters
    ----------
    config : TrainConfig
        Settings.
    reference : PolicyValueModel
        The policy to start from, and to be held to; it is not changed.
    reward_model : callable
        Scores reviews, shape (B, T + 1), as a tensor of shape (B,).
    """

    def __init__(
        self, config: TrainConfig, reference: PolicyValueModel, reward_model: Reward
    ) -> None:
        self.config, self.row = config, config.row
        self.reference, self.reward_model = reference, reward_model
        self.policy = copy.deepcopy(reference)
        self.optimizer = torch.optim.Adam(
            self.policy.parameters(), lr=config.learning_rate, fused=True
        )
        self.generator = torch.Generator().manual_seed(config.seed)
        self.kl_weight = config.kl_weight if self.row.kl != "none" else 0.0
        self.history: list[dict[str, float]] = []

    # --- one batch ---

    def step(self) -> dict[str, float]:
        """Take one batch: sample, score, a few epochs of gradient steps. Returns its metrics.

        Raises
        ------
        TrainingError
            If a metric or a weight is no longer a number; the message says which, and the history
            does not get it.
        """
        c, row = self.config, self.row
        batch, metrics = self.rollout()
        seen = defaultdict(list)
        for _ in range(c.epochs):
            order = torch.randperm(c.batch_size, generator=self.generator)
            for rows in order.split(c.batch_size // c.minibatches):
                part = batch.rows(rows)
                logits, values = self.policy(part.tokens[:, :-1], used_positions(part.mask))
                logits = logits / c.temperature
                log_probs = next_token_log_probs(logits, part.tokens)
                found = losses(
                    row,
                    part,
                    log_probs,
                    values if row.advantage == "gae" else None,
                    entropies=entropy(logits) if c.entropy_weight > 0 else None,
                    kl_weight=self.kl_weight if row.kl == "loss" else 0.0,
                    value_weight=c.value_weight,
                    value_clip=c.value_clip,
                    entropy_weight=c.entropy_weight,
                    length=COMPLETION_LENGTH if row.aggregation == "fixed" else None,
                )
                norm = descend(found.loss, self.policy, self.optimizer, c.max_grad_norm)
                seen["grad_norm"].append(norm)
                seen["policy_loss"].append(found.policy.detach())
                if found.value is not None:
                    seen["value_loss"].append(found.value.detach())
            with torch.no_grad():  # how far the epoch has gone is seen at its end
                moved = approx_kl(log_probs, part.old_log_probs, part.mask)
                seen["approx_kl"].append(moved)
                if isinstance(row.clip, Clip):
                    share = clip_fraction(row.clip, found.ratio, part.advantages, part.mask)
                    seen["clip_fraction"].append(share)
            if c.target_kl is not None and moved > c.target_kl:
                break
        metrics |= {name: torch.stack(values).mean().item() for name, values in seen.items()}
        metrics["gradient_steps"] = float(len(seen["grad_norm"]))
        size = nn.utils.get_total_norm([p.detach() for p in self.policy.parameters()])
        self._require_numbers({**metrics, "norm of the weights": size.item()})
        if c.adaptive_kl_target is not None and row.kl != "none":
            self.kl_weight = adaptive_kl_weight(
                self.kl_weight,
                max(metrics["kl"], 0.0),
                target=c.adaptive_kl_target,
                horizon=c.adaptive_kl_horizon,
                samples=c.batch_size,
            )
        self.history.append(metrics)
        return metrics

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
        tokens, mask = written.tokens, written.mask
        with torch.no_grad():
            ref_logits = self.reference(tokens[:, :-1])[0] / c.temperature
            ref_log_probs = next_token_log_probs(ref_logits, tokens)
            reward, rule = self.reward_model(tokens), rule_reward(tokens)
        per_token = kl_estimate(written.log_probs, ref_log_probs, "k1", mask)
        metrics = {
            "reward": reward.mean().item(),
            "gold": gold_reward(tokens).mean().item(),
            "rule": rule.mean().item(),
            "kl": per_token.sum(-1).mean().item(),
            "entropy": masked_mean(written.entropies, mask).item(),
            "length": written.lengths.float().mean().item(),
            "kl_weight": self.kl_weight,
        }
        self._require_numbers(metrics)  # before anything is learned from them
        scores = rule if c.reward == "rule" else reward
        advantages, returns = self._advantages(written, scores, per_token)
        batch = Batch(
            tokens=tokens,
            mask=mask,
            old_log_probs=written.log_probs,
            advantages=advantages,
            returns=returns,
            old_values=written.values,
            ref_log_probs=ref_log_probs,
        )
        if returns is not None:
            explained = explained_variance(written.values, returns, mask).item()
            if not math.isnan(explained):  # returns that do not vary leave nothing to explain
                metrics["explained_variance"] = explained
        return batch, metrics

    def _advantages(
        self, written: Completions, scores: Tensor, kl: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Advantages, and the returns that a value head should predict, if there is one."""
        c, mask = self.config, written.mask
        if c.whiten_rewards:
            scores = whiten(scores, torch.ones_like(scores))
        penalty = self.kl_weight if self.row.kl == "reward" else 0.0
        if self.row.advantage != "gae":
            totals = (scores - penalty * kl.sum(-1)).view(-1, c.group_size)
            return completion_advantages(self.row, totals).view(-1, 1).expand(mask.shape), None
        last = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))
        rewards = torch.where(last, scores[:, None], 0.0) - penalty * kl
        advantages, returns = gae(rewards, written.values, mask, c.gamma, c.lam)
        return whiten(advantages, mask) if c.whiten_advantages else advantages, returns

    def _require_numbers(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise TrainingError(
                    f"{name} became {value} in batch {len(self.history) + 1} of {self.config.steps}"
                )

    def run(self) -> Iterator[dict[str, float]]:
        """Take the batches that are left, one at a time; yields the metrics of each."""
        while len(self.history) < self.config.steps:
            yield self.step()

    # --- keeping it ---

    def state(self) -> dict[str, Any]:
        """Return all that a run needs to go on as if it had not stopped."""
        return {
            "config": self.config.settings(),
            "row": repr(self.row),
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
            If it cannot be read, was written with other settings, or has more batches than these
            settings ask for; more steps are no other setting.
        """
        try:
            state = torch.load(path, weights_only=True)
            missing = self.state().keys() - state.keys()
        except Exception as error:  # of many kinds, by what is broken
            raise ValueError(f"{path} must be a checkpoint of ppo_demo: {error}") from error
        require("checkpoint", str(path), not missing, f"complete; it lacks {sorted(missing)}")
        mine = self.config.settings() | {"row": repr(self.row)}
        its = state["config"] | {"row": state["row"]}
        for name, value in mine.items():
            same = name == "steps" or its.get(name) == value
            require(name, value, same, f"{its.get(name)!r} to go on from {path}")
        done, steps = len(state["history"]), self.config.steps
        require("steps", steps, steps >= done, f"at least the {done} that {path} has done")
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.kl_weight = state["kl_weight"]
        self.history = state["history"]


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file beside its place and move it there once it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    try:
        with draft.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        error.filename = str(path)  # a full disk names no file
        raise


def write_history(path: Path, config: TrainConfig, history: list[dict[str, float]]) -> None:
    """Write settings and metrics of a run as JSON."""
    record = {"config": config.settings(), "history": history}
    text = json.dumps(record, indent=1, allow_nan=False)
    write_atomically(path, text.encode())


def train(
    config: TrainConfig, reference: PolicyValueModel, reward_model: RewardModel | Reward
) -> Trainer:
    """Run a training from start to end.

    Parameters
    ----------
    config, reference, reward_model
        As for `Trainer`.

    Returns
    -------
    Trainer
        With the trained ``policy`` and the ``history``.
    """
    trainer = Trainer(config, reference, reward_model)
    for _ in trainer.run():
        pass
    return trainer
