"""A task to try a PPO step on: a tiny language model that is paid for each "coin" it writes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppo_demo.advantages import whiten
from ppo_demo.algorithms import ALGORITHMS
from ppo_demo.divergences import categorical_kl
from ppo_demo.lm.model import ModelConfig, PolicyValueModel
from ppo_demo.lm.rollout import Completions, sample
from ppo_demo.lm.step import descend, next_token_log_probs
from ppo_demo.losses import Algorithm, Batch, losses

# Padding and end are tokens 0 and 1, as in the corpus of reviews: one sampler serves both.
VOCABULARY = ("<pad>", "<end>", "bot", "runs", "jumps", "coin", "over", "gap", "and", "rests")
PAD, END, COIN = (VOCABULARY.index(word) for word in ("<pad>", "<end>", "coin"))
PROMPT_LENGTH, COMPLETION_LENGTH = 3, 8

PPO = replace(ALGORITHMS["ppo"], kl="loss", kl_estimator="exact")
"""PPO with the KL term in the loss, computed over all actions: the vocabulary is small."""


@dataclass(frozen=True)
class Rollout:
    """A batch and what it earned.

    Attributes
    ----------
    batch : Batch
        For `ppo_step`.
    rewards : tensor, shape (B,)
        Coins in each completion.
    old_logits : tensor, shape (B, T + 1, V)
        Of the policy that sampled.
    """

    batch: Batch
    rewards: Tensor
    old_logits: Tensor


def new_model(seed: int) -> PolicyValueModel:
    """Return an untrained model of one layer and 32 channels; the seed fixes its weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        context = PROMPT_LENGTH + COMPLETION_LENGTH
        return PolicyValueModel(
            ModelConfig(len(VOCABULARY), context, layers=1, width=32, padding=PAD)
        )


def write(model: PolicyValueModel, count: int, generator: torch.Generator) -> Completions:
    """Write completions to random prompts.

    Parameters
    ----------
    model : PolicyValueModel
        The policy.
    count : int
        Number of completions.
    generator : torch.Generator
        Source of chance; it fixes the result.

    Returns
    -------
    Completions
        Of PROMPT_LENGTH + COMPLETION_LENGTH tokens.
    """
    size = (count, PROMPT_LENGTH)
    prompts = torch.randint(END + 1, len(VOCABULARY), size, generator=generator)
    return sample(model, prompts, generator, max_tokens=COMPLETION_LENGTH, end=END)


@torch.no_grad()
def rollout(
    model: PolicyValueModel,
    reference: PolicyValueModel,
    count: int,
    generator: torch.Generator,
) -> Rollout:
    """Sample completions, count their coins and compare each with what was expected.

    The advantage of a completion is its reward less the mean reward, over the deviation; each
    of its tokens gets that same number. It stands on prompt and padding too, as it does when
    a per-completion number is broadcast: leaving them out is the mask's work.

    Parameters
    ----------
    model, reference : PolicyValueModel
        The policy that samples, and the one that the KL term holds it to.
    count : int
        Number of completions, at least 2.
    generator : torch.Generator
        Source of chance.

    Returns
    -------
    Rollout
        The batch with its rewards.
    """
    written = write(model, count, generator)
    tokens, mask = written.tokens, written.mask
    rewards = ((tokens[:, 1:] == COIN) & mask).sum(-1).float()
    advantages = whiten(rewards, torch.ones_like(rewards))
    old_logits, _ = model(tokens)
    batch = Batch(
        tokens=tokens,
        mask=mask,
        old_log_probs=next_token_log_probs(old_logits, tokens),
        ref_logits=reference(tokens)[0][:, :-1],
        advantages=advantages[:, None].expand(mask.shape),
        returns=rewards[:, None].expand(mask.shape),
    )
    return Rollout(batch, rewards, old_logits)


def ppo_step(
    model: PolicyValueModel,
    optimizer: torch.optim.Optimizer,
    sampled: Rollout,
    *,
    algorithm: Algorithm = PPO,
    kl_weight: float = 0.05,
) -> dict[str, float]:
    """Take one gradient step on a batch, as the trainer does.

    Parameters
    ----------
    model : PolicyValueModel
        The policy with its value head.
    optimizer : torch.optim.Optimizer
        Over the model's parameters.
    sampled : Rollout
        What was sampled; it may be used for a few steps.
    algorithm : Algorithm
        With an exact KL term in the loss. A fixed length is COMPLETION_LENGTH.
    kl_weight : float
        β.

    Returns
    -------
    dict of str to float
        ``policy_loss``, ``value_loss``, ``kl`` (nats a token) and ``grad_norm`` before the step.
    """
    batch = sampled.batch
    logits, values = model(batch.tokens)
    logits, values = logits[:, :-1], values[:, :-1]  # nothing follows the last token
    log_probs = next_token_log_probs(logits, batch.tokens)
    kl = categorical_kl(logits, batch.ref_logits, batch.mask)
    length = COMPLETION_LENGTH if algorithm.aggregation == "fixed" else None
    found = losses(algorithm, batch, log_probs, values, kl=kl, kl_weight=kl_weight, length=length)
    norm = descend(found.loss, model, optimizer, max_grad_norm=1.0)
    return {
        "policy_loss": found.policy.item(),
        "value_loss": found.value.item(),
        "kl": found.kl.item(),
        "grad_norm": norm.item(),
    }


Step = Callable[[PolicyValueModel, torch.optim.Optimizer, Rollout], Mapping[str, float]]


def train(
    iterations: int,
    seed: int = 0,
    *,
    step: Step = ppo_step,
    epochs: int = 4,
    learning_rate: float = 3e-3,
) -> tuple[PolicyValueModel, list[dict[str, float]]]:
    """Train a new model: one batch of 128 completions an iteration.

    Parameters
    ----------
    iterations : int
        Batches.
    seed : int
        Fixes the model's weights and every sample.
    step : callable
        Takes model, optimiser and `Rollout`, makes one gradient step, returns its metrics.
    epochs : int
        Gradient steps on each batch.
    learning_rate : float
        Of Adam.

    Returns
    -------
    model : PolicyValueModel
        After training.
    history : list of dict
        Of each iteration, the last step's metrics and the mean ``reward`` of its batch.
    """
    model, reference = new_model(seed), new_model(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    generator = torch.Generator().manual_seed(seed)
    history = []
    for _ in range(iterations):
        sampled = rollout(model, reference, 128, generator)
        for _ in range(epochs):
            metrics = step(model, optimizer, sampled)
        history.append({"reward": sampled.rewards.mean().item(), **metrics})
    return model, history
