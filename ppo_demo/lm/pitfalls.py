"""The PPO step that circulates, its faults one by one, and what each does to the gradient."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppo_demo.algorithms import ALGORITHMS
from ppo_demo.lm.coins import Rollout
from ppo_demo.lm.model import PolicyValueModel
from ppo_demo.lm.step import descend, next_token_log_probs
from ppo_demo.losses import Batch, Losses, losses

PPO = ALGORITHMS["ppo"]

Fault = Callable[[Tensor, Tensor, Batch, Tensor], Losses]
"""Takes logits, values, a batch and the old logits; returns the losses of the policy and value."""


def circulating_loss(
    logits: Tensor, values: Tensor, batch: Batch, old_logits: Tensor, clip_range: float = 0.2
) -> Tensor:
    """Compute the loss as short listings have it. It runs, and it is wrong four times over.

    Parameters
    ----------
    logits, old_logits : tensor, shape (B, T + 1, V)
        Of the policy that is trained, and of the one that sampled.
    values : tensor, shape (B, T + 1)
        Of the value head.
    batch : Batch
        What was sampled.
    clip_range : float
        ε.

    Returns
    -------
    scalar tensor
        Something that an optimiser will gladly minimise.
    """
    old_logprobs = F.log_softmax(old_logits, dim=-1)
    advantages = batch.advantages[:, :1]
    returns = batch.returns[:, :1].expand_as(values)

    ratio = torch.exp(F.log_softmax(logits, dim=-1) - old_logprobs)
    surr1 = ratio * advantages[..., None]
    surr2 = torch.clamp(ratio, 1 - clip_range, 1 + clip_range) * advantages[..., None]
    policy_loss = -torch.min(surr1, surr2).mean()
    value_loss = 0.5 * F.mse_loss(values, returns)
    return policy_loss + 0.5 * value_loss


def circulating_step(
    model: PolicyValueModel, optimizer: torch.optim.Optimizer, sampled: Rollout
) -> dict[str, float]:
    """Take one gradient step on `circulating_loss`."""
    logits, values = model(sampled.batch.tokens)
    loss = circulating_loss(logits, values, sampled.batch, sampled.old_logits)
    descend(loss, model, optimizer, max_grad_norm=1.0)
    return {"loss": loss.item()}


def _whole_vocabulary(logits: Tensor, values: Tensor, batch: Batch, old_logits: Tensor) -> Losses:
    def flat(x: Tensor) -> Tensor:
        return x.expand(*batch.mask.shape, logits.shape[-1]).flatten(1)

    every = Batch(
        mask=flat(batch.mask[..., None]),
        old_log_probs=flat(F.log_softmax(old_logits, -1)[:, :-1]),
        advantages=flat(batch.advantages[..., None]),
    )
    policy = losses(PPO, every, flat(F.log_softmax(logits, -1)[:, :-1])).policy
    return replace(_right(logits, values, batch, old_logits), policy=policy)


def _no_shift(logits: Tensor, values: Tensor, batch: Batch, old_logits: Tensor) -> Losses:
    # The mask is of the tokens themselves, so that the same tokens are scored.
    index = batch.tokens[:, 1:, None]
    now, old = (
        F.log_softmax(x, -1)[:, 1:].gather(-1, index).squeeze(-1) for x in (logits, old_logits)
    )
    return losses(PPO, replace(batch, old_log_probs=old), now, values[:, :-1])


def _mean_over_all(logits: Tensor, values: Tensor, batch: Batch, old_logits: Tensor) -> Losses:
    every = replace(batch, mask=torch.ones_like(batch.mask))
    return _right(logits, values, every, old_logits)


def _half_twice(logits: Tensor, values: Tensor, batch: Batch, old_logits: Tensor) -> Losses:
    found = _right(logits, values, batch, old_logits)
    return replace(found, value=0.5 * found.value)


def _right(logits: Tensor, values: Tensor, batch: Batch, _: Tensor) -> Losses:
    return losses(PPO, batch, next_token_log_probs(logits, batch.tokens), values[:, :-1])


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "none": _right,
        "ratio over the whole vocabulary": _whole_vocabulary,
        "no shift between logits and tokens": _no_shift,
        "mean over prompt and padding": _mean_over_all,
        "one half twice on the value loss": _half_twice,
    }
)
"""Each fault put alone into the right step."""


def gradients(
    model: nn.Module, batch: Batch, old_logits: Tensor, fault: Fault
) -> tuple[Tensor, Tensor]:
    """Gradients of the policy loss and of the value loss, each as one long vector.

    Parameters
    ----------
    model : module
        Maps tokens to logits and values.
    batch : Batch
        What was sampled.
    old_logits : tensor, shape (B, T + 1, V)
        Of the policy that sampled.
    fault : callable
        A value of `FAULTS`.

    Returns
    -------
    policy, value : tensor, shape (parameters,)
        The gradients.
    """
    parameters = list(model.parameters())
    logits, values = model(batch.tokens)
    found = fault(logits, values, batch, old_logits)
    policy, value = (
        torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
        for loss in (found.policy, found.value)
    )
    return nn.utils.parameters_to_vector(policy), nn.utils.parameters_to_vector(value)


def compare(vector: Tensor, right: Tensor) -> tuple[float, float]:
    """Return the cosine of the angle between two vectors and the ratio of their lengths."""
    cosine = F.cosine_similarity(vector, right, dim=0).item()
    return cosine, (vector.norm() / right.norm()).item()
