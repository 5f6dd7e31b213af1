"""The two ends of a gradient step: what the model's outputs say of the tokens, and the descent."""

import torch
from torch import Tensor, nn

from ppo_demo._arrays import log_softmax


def next_token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token given those before it.

    Parameters
    ----------
    logits : tensor, shape (B, T + 1, V) or (B, T, V)
        At position t, for the token at t + 1; those of the last token predict nothing here.
    tokens : int64 tensor, shape (B, T + 1)
        Token ids.

    Returns
    -------
    tensor, shape (B, T)
        At position t, of token t + 1; the first token has none.
    """
    log_probs: Tensor = log_softmax(logits[:, : tokens.shape[1] - 1])
    return log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def used_positions(mask: Tensor) -> Tensor:
    """Return where a model's outputs count, or are read by those that do.

    Parameters
    ----------
    mask : bool tensor, shape (B, T)
        True where the output at a position is about a token of the completion.

    Returns
    -------
    bool tensor, shape (B, T)
        True up to the last such position of each sequence: what follows is padding.
    """
    return mask.flip(-1).cummax(-1).values.flip(-1)


def descend(
    loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float
) -> Tensor:
    """Take one gradient step.

    Parameters
    ----------
    loss : scalar tensor
        To be minimised.
    model : module
        Whose parameters the loss depends on.
    optimizer : torch.optim.Optimizer
        Over these parameters.
    max_grad_norm : float
        A longer gradient is scaled down to this.

    Returns
    -------
    scalar tensor
        The gradient's norm before that.
    """
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return norm
