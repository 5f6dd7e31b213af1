"""Sampling: completions token by token, with a key/value cache, many at once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_demo._arrays import keep
from ppo_demo._checks import positive, require
from ppo_demo.lm.corpus import END, PAD
from ppo_demo.lm.model import PolicyValueModel


@dataclass(frozen=True)
class Completions:
    """What a policy wrote.

    Attributes
    ----------
    tokens : int64 tensor, shape (B, T + 1)
        Prompt, completion up to its end token, padding.
    mask : bool tensor, shape (B, T)
        True at t where token t + 1 was written by the policy.
    log_probs : tensor, shape (B, T)
        Of token t + 1 when it was sampled; 0 elsewhere.
    values : tensor, shape (B, T)
        Of the state in which token t + 1 was written; 0 elsewhere.
    entropies : tensor, shape (B, T)
        Of the distribution that token t + 1 was drawn from, in nats; 0 elsewhere.
    """

    tokens: Tensor
    mask: Tensor
    log_probs: Tensor
    values: Tensor
    entropies: Tensor

    def rows(self, index: Tensor) -> "Completions":
        """Return some of them."""
        return Completions(**{name: value[index] for name, value in vars(self).items()})

    @property
    def lengths(self) -> Tensor:
        """Tokens that the policy wrote; shape (B,)."""
        return self.mask.sum(-1)


def require_temperature(temperature: float) -> None:
    """Refuse what overflows, and what lifts the logit of padding, −1e9, to where it is drawn."""
    positive(temperature=temperature)
    require("temperature", temperature, 1e-6 <= temperature <= 1e6, "from 1e-6 to 1e6")


@torch.no_grad()
def sample(
    model: PolicyValueModel,
    prompts: Tensor,
    generator: torch.Generator,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    end: int | None = END,
) -> Completions:
    """Complete prompts, each until its end token.

    Parameters
    ----------
    model : PolicyValueModel
        The policy.
    prompts : int64 tensor, shape (B, prompt)
        Prompts of one length.
    generator : torch.Generator
        Source of chance; it fixes the result.
    max_tokens : int
        Tokens of a completion at most.
    temperature : float
        Logits are divided by it; from 1e-6 to 1e6.
    end : int, optional
        The token after which a completion is over; None goes on to `max_tokens`.

    Returns
    -------
    Completions
        Of `prompt + max_tokens` tokens, whatever was written.

    Raises
    ------
    ValueError
        If the temperature is out of range, `max_tokens` is below 1, or the context is too short.
    """
    batch, prompt = prompts.shape
    time = prompt + max_tokens
    require_temperature(temperature)
    room = model.config.context - prompt
    require("max_tokens", max_tokens, 1 <= max_tokens <= room, f"from 1 to {room}")
    written, logits, values = _write(model, prompts, max_tokens, generator, temperature, end)
    tokens = torch.cat([prompts, written], dim=1)
    mask = torch.zeros(batch, time - 1, dtype=torch.bool)
    if end is None:
        mask[:, prompt - 1 :] = True
    else:
        over = (written == end).cumsum(-1)
        mask[:, prompt - 1 :] = (over == 0) | ((over == 1) & (written == end))
    tokens[:, 1:][:, prompt - 1 :].masked_fill_(~mask[:, prompt - 1 :], PAD)
    logs = logits.log_softmax(-1)
    # A token that cannot be drawn has a logarithm of −∞ and no share in the entropy.
    found = -(logs.exp() * logs.clamp(min=-1e9)).sum(-1)
    taken = logs.gather(-1, written[..., None]).squeeze(-1)
    log_probs, values, entropies = (
        keep(torch.cat([torch.zeros(batch, prompt - 1), x], dim=1), mask)
        for x in (taken, values, found)
    )
    return Completions(tokens, mask, log_probs, values, entropies)


@torch.inference_mode()
def _write(
    model: PolicyValueModel,
    prompts: Tensor,
    max_tokens: int,
    generator: torch.Generator,
    temperature: float,
    end: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens one after the other; what follows an end is left as it comes."""
    batch, prompt = prompts.shape
    words = model.config.vocabulary
    written = torch.zeros(batch, max_tokens, dtype=torch.long)
    logits, values = torch.zeros(batch, max_tokens, words), torch.zeros(batch, max_tokens)
    uniform = torch.rand(batch, max_tokens, 1, generator=generator)
    cache = model.new_cache(batch)
    running = torch.ones(batch, dtype=torch.bool)
    fresh, start = prompts, 0
    for place in range(max_tokens):
        scores, value = model(fresh, cache=cache, start=start)
        step = scores[:, -1] / temperature
        logits[:, place], values[:, place] = step, value[:, -1]
        # The word in whose share of [0, 1) the number falls; rounding may leave a gap at 1.
        reached = step.softmax(-1).cumsum(-1) <= uniform[:, place]
        fresh = reached.sum(-1, keepdim=True).clamp_(max=words - 1)
        written[:, place : place + 1] = fresh
        start = prompt + place
        if end is not None:
            running &= fresh[:, 0] != end
            if not running.any():
                break
    # Ordinary tensors: those of inference mode cannot take part in training.
    with torch.inference_mode(False):
        return written.clone(), logits.clone(), values.clone()
