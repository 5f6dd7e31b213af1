"""One PPO step on a batch of completions: the function that trains, and that the book prints."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ppo_demo._arrays import log_softmax
from ppo_demo.aggregation import masked_mean
from ppo_demo.divergences import categorical_kl
from ppo_demo.surrogates import clipped_surrogate, probability_ratio, value_loss


@dataclass(frozen=True)
class Batch:
    """Completions as they were sampled; every tensor but `tokens` is about the *next* token.

    Attributes
    ----------
    tokens : int64 tensor, shape (batch, time)
        Prompt, completion, padding.
    mask : bool tensor, shape (batch, time - 1)
        True at t where token t + 1 belongs to the completion.
    old_log_probs : tensor, shape (batch, time - 1)
        Of token t + 1 under the policy that sampled it.
    ref_logits : tensor, shape (batch, time - 1, vocabulary)
        Of the reference policy.
    advantages, returns : tensor, shape (batch, time - 1)
        Advantage estimate of token t + 1, and the return that the value head should predict.
    """

    tokens: Tensor
    mask: Tensor
    old_log_probs: Tensor
    ref_logits: Tensor
    advantages: Tensor
    returns: Tensor


def next_token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token given those before it.

    Parameters
    ----------
    logits : tensor, shape (batch, time or time - 1, vocabulary)
        At position t, for the token at t + 1; those of the last token predict nothing here.
    tokens : int64 tensor, shape (batch, time)
        Token ids.

    Returns
    -------
    tensor, shape (batch, time - 1)
        At position t, of token t + 1; the first token has none.
    """
    log_probs: Tensor = log_softmax(logits[:, : tokens.shape[1] - 1])
    return log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def ppo_losses(
    logits: Tensor, values: Tensor, batch: Batch, clip_range: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Policy loss, value loss and KL, each a mean over the completions' tokens.

    Parameters
    ----------
    logits : tensor, shape (batch, time, vocabulary)
        Of the policy that is trained.
    values : tensor, shape (batch, time)
        Of its value head.
    batch : Batch
        What was sampled.
    clip_range : float
        ε, above 0.

    Returns
    -------
    policy_loss, value_loss, kl : scalar tensors
        To be minimised; `kl` is the exact divergence from the reference, in nats a token.
    """
    log_probs = next_token_log_probs(logits, batch.tokens)
    ratio = probability_ratio(log_probs, batch.old_log_probs, batch.mask)
    surrogate = clipped_surrogate(ratio, batch.advantages, clip_range)
    policy = -masked_mean(surrogate, batch.mask)
    value = value_loss(values[:, :-1], batch.returns, mask=batch.mask)
    kl = categorical_kl(logits[:, :-1], batch.ref_logits, batch.mask)
    return policy, masked_mean(value, batch.mask), masked_mean(kl, batch.mask)


def ppo_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    clip_range: float = 0.2,
    kl_weight: float = 0.05,
    value_weight: float = 0.5,
    max_grad_norm: float = 1.0,
) -> dict[str, float]:
    """Take one gradient step on a batch.

    Parameters
    ----------
    model : module
        Maps tokens to logits (batch, time, vocabulary) and values (batch, time).
    optimizer : torch.optim.Optimizer
        Over the model's parameters.
    batch : Batch
        What was sampled; the same batch may be used for a few steps.
    clip_range, kl_weight, value_weight : float
        ε, β and the weight of the value loss.
    max_grad_norm : float
        The gradient is scaled down to this length if it is longer.

    Returns
    -------
    dict of str to float
        ``policy_loss``, ``value_loss``, ``kl`` and ``grad_norm`` before the step.
    """
    logits, values = model(batch.tokens)
    policy, value, kl = ppo_losses(logits, values, batch, clip_range)
    loss = policy + value_weight * value + kl_weight * kl
    optimizer.zero_grad()
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return {
        "policy_loss": policy.item(),
        "value_loss": value.item(),
        "kl": kl.item(),
        "grad_norm": grad_norm.item(),
    }
