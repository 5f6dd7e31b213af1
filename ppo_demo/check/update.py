"""A whole update on the coin task: what it is tried on, its parts, and what goes wrong."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_demo._arrays import log_softmax
from ppo_demo.advantages import whiten
from ppo_demo.check.engine import Example, Fault, Subject
from ppo_demo.divergences import categorical_kl
from ppo_demo.lm.coins import (
    COMPLETION_LENGTH,
    Rollout,
    new_model,
    ppo_step,
    rollout,
)
from ppo_demo.lm.model import PolicyValueModel
from ppo_demo.lm.step import descend, next_token_log_probs
from ppo_demo.losses import Algorithm, Batch, losses

KL_WEIGHT = 0.05
RATE = 0.5
"""Learning rate, so that a step of length 1 moves ratios out of the clip range."""

Step = Callable[[PolicyValueModel, torch.optim.Optimizer, Rollout], Any]


def changes(step: Step, count: Any, steps: Any) -> Tensor:
    """Return by how much a few steps on one batch change the parameters, over the rate.

    Parameters
    ----------
    step : callable
        Makes one.
    count, steps : int64 tensor, shape (1,)
        Completions in the batch, and how often it is used.

    Returns
    -------
    tensor, shape (parameters,)
        Of float64.
    """
    # Two models, so that the policy is not its reference from the start.
    model, reference = new_model(0), new_model(1)
    sampled = rollout(model, reference, int(count), torch.Generator().manual_seed(0))
    wide = {
        name: value.double() if value is not None and value.is_floating_point() else value
        for name, value in vars(sampled.batch).items()
    }
    sampled = Rollout(Batch(**wide), sampled.rewards.double(), sampled.old_logits.double())
    model = model.double()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(int(steps)):
        step(model, optimizer, sampled)
    after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return (after - before) / RATE


@cache
def _parameters() -> int:
    return sum(p.numel() for p in new_model(0).parameters())


def _examples() -> tuple[Example, ...]:
    def make(name: str, count: int, steps: int) -> Example:
        given = {"count": np.array([count]), "steps": np.array([steps])}
        return Example(name, given, (_parameters(),))

    return (
        make("the first step on a batch", 8, 1),
        make("the second step on it", 8, 2),
        make("five steps on a larger one", 16, 5),
    )


@dataclass(frozen=True)
class Parts:
    """A step, taken apart so that faults can be put into it.

    Attributes
    ----------
    algorithm : Algorithm
        The row.
    scores : callable
        Takes logits and tokens; returns log-probabilities.
    old : callable
        Takes what was sampled and the new log-probabilities; returns the old ones.
    mask, advantages, values : callable
        What is made of these; the first two take the batch.
    everywhere : bool
        The policy loss runs over the whole vocabulary.
    kl : callable
        Takes logits and those of the reference.
    kl_weight, value_weight, sign : float
        Weights of the terms.
    zero, clip : bool
        Whether gradients are zeroed first, and clipped.
    move : bool
        Whether the optimiser makes its step.
    """

    algorithm: Algorithm
    scores: Callable[..., Any] = next_token_log_probs
    old: Callable[..., Any] = lambda sampled, _: sampled.batch.old_log_probs
    mask: Callable[..., Any] = lambda batch: batch.mask
    advantages: Callable[..., Any] = lambda batch: batch.advantages
    values: Callable[..., Any] = lambda values: values[:, :-1]
    everywhere: bool = False
    kl: Callable[..., Any] = categorical_kl
    kl_weight: float = KL_WEIGHT
    value_weight: float = 0.5
    sign: float = 1.0
    zero: bool = True
    clip: bool = True
    move: bool = True

    def __call__(
        self, model: PolicyValueModel, optimizer: torch.optim.Optimizer, sampled: Rollout
    ) -> None:
        """Make one step."""
        batch = sampled.batch
        logits, values = model(batch.tokens)
        log_probs = self.scores(logits, batch.tokens)
        batch = replace(
            batch,
            mask=self.mask(batch),
            advantages=self.advantages(batch),
            old_log_probs=self.old(sampled, log_probs).detach(),
        )
        length = COMPLETION_LENGTH if self.algorithm.aggregation == "fixed" else None
        kl = self.kl(logits[:, :-1], batch.ref_logits)
        found = losses(self.algorithm, batch, log_probs, self.values(values), kl=kl, length=length)
        policy = found.policy
        if self.everywhere:
            policy = losses(
                self.algorithm, _every(batch, sampled), _flat(logits[:, :-1]), length=length
            ).policy
        loss = self.sign * policy + self.value_weight * found.value + self.kl_weight * found.kl
        if self.zero and self.clip and self.move:
            descend(loss, model, optimizer, max_grad_norm=1.0)
            return
        if self.zero:
            optimizer.zero_grad()
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if self.move:
            optimizer.step()


def _flat(logits: Tensor) -> Tensor:
    found: Tensor = log_softmax(logits)
    return found.flatten(1)


def _every(batch: Batch, sampled: Rollout) -> Batch:
    """Return the batch as if every token of the vocabulary had been chosen."""
    old = sampled.old_logits[:, :-1]
    return Batch(
        mask=batch.mask[..., None].expand(old.shape).flatten(1),
        old_log_probs=_flat(old),
        advantages=batch.advantages[..., None].expand(old.shape).flatten(1),
    )


def _unshifted(logits: Tensor, tokens: Tensor) -> Tensor:
    found: Tensor = log_softmax(logits)[:, 1:].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return found


def _always(**change: Any) -> Callable[[Algorithm], Any]:
    return lambda _: change


def _ref_log_probs(batch: Batch) -> Tensor:
    padded = torch.nn.functional.pad(batch.ref_logits, (0, 0, 0, 1))
    return next_token_log_probs(padded, batch.tokens)


FAULTS = (
    Fault(
        "the ratio runs over the whole vocabulary",
        "tokens that nobody chose are pushed as well: the policy gradient is gone",
        "the reward does not rise; the loss is right on the first batch",
        _always(everywhere=True),
    ),
    Fault(
        "there is no shift: the logits at t are read for token t, not for the one after it",
        "the policy learns to repeat what it has just read",
        "log-probabilities differ from the sampler's on the first batch",
        _always(scores=_unshifted, old=lambda s, _: _unshifted(s.old_logits, s.batch.tokens)),
    ),
    Fault(
        "the means run over prompt and padding too",
        "prompts, which nobody chose, are learned as if they were answers",
        "the loss changes when a batch is padded further",
        _always(mask=lambda batch: torch.ones_like(batch.mask)),
    ),
    Fault(
        "the old log-probabilities are those of the new policy",
        "every ratio is 1 and nothing is ever clipped",
        "a clip fraction of 0 on every batch",
        _always(old=lambda _, log_probs: log_probs),
    ),
    Fault(
        "the sign of the policy loss is turned round",
        "training makes good answers rarer",
        "the reward falls from the first batches on",
        _always(sign=-1.0),
    ),
    Fault(
        "returns are taken for advantages",
        "without the baseline every rewarded answer is pushed up",
        "a first policy loss far from 0",
        _always(advantages=lambda batch: batch.returns),
    ),
    Fault(
        "the advantages are whitened over the tokens, padding too",
        "what stands on padding shifts the advantages of real tokens",
        "advantages change when a batch is padded further",
        _always(advantages=lambda b: whiten(b.advantages * b.mask, torch.ones_like(b.mask))),
    ),
    Fault(
        "the KL term is left out",
        "nothing holds the policy near its reference",
        "β changes nothing",
        _always(kl_weight=0.0),
    ),
    Fault(
        "the KL term has the wrong sign",
        "the policy is paid for moving away from the reference",
        "the KL grows with β",
        _always(kl_weight=-KL_WEIGHT),
    ),
    Fault(
        "the other KL is taken: from the reference to the policy",
        "the policy is made to cover all that the reference does, not to stay within it",
        "nothing to see where they are close",
        _always(kl=lambda logits, ref: categorical_kl(ref, logits)),
    ),
    Fault(
        "the KL is in the reward and in the loss at once",
        "β acts twice",
        "the KL is half of what β should give",
        _always(
            advantages=lambda b: b.advantages - KL_WEIGHT * (b.old_log_probs - _ref_log_probs(b))
        ),
    ),
    Fault(
        "the value loss is left out",
        "the critic stays as it was made",
        "explained variance stays at 0",
        _always(value_weight=0.0),
    ),
    Fault(
        "the value after a token is taken for the value before it",
        "the critic has seen the token that it should be compared with",
        "explained variance that is too good",
        _always(values=lambda values: values[:, 1:]),
    ),
    Fault(
        "gradients are not zeroed",
        "each step repeats all those before it",
        "a gradient norm that grows without bound",
        _always(zero=False),
    ),
    Fault(
        "gradients are not clipped",
        "one odd batch can undo many good ones",
        "spikes of the loss",
        _always(clip=False),
    ),
    Fault(
        "the optimiser makes no step",
        "nothing is learned",
        "parameters that do not change",
        _always(move=False),
    ),
    Fault(
        "the value loss is halved twice",
        "the critic learns at half the rate",
        "none: the weight of the value loss could do the same",
        _always(value_weight=0.25),
        convention=True,
    ),
    Fault(
        "the squared error is not halved",
        "the critic learns at twice the rate",
        "none: the weight of the value loss could do the same",
        _always(value_weight=1.0),
        convention=True,
    ),
)
"""What is known to go wrong in a whole step, and conventions that are no faults."""


@cache
def subject(algorithm: Algorithm) -> Subject:
    """Return what a step is checked for; the row's KL term is replaced by an exact one."""
    row = replace(algorithm, kl="loss", kl_estimator="exact", kl_weighted=False)
    right: Step = partial(ppo_step, algorithm=row, kl_weight=KL_WEIGHT)
    whole = Parts(row)
    return Subject(
        title=f"a step of {row.name} on the coin task",
        right=partial(changes, right),
        build=lambda **change: partial(changes, replace(whole, **change)),
        faults=FAULTS,
        asked=row,
        examples=_examples(),
    )
