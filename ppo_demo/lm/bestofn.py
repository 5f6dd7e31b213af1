"""Choosing instead of training: best-of-n sampling and rejection-sampling fine-tuning."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ppo_demo._checks import at_least, require, whole
from ppo_demo.aggregation import masked_mean
from ppo_demo.divergences import best_of_n_log_ratio
from ppo_demo.lm.corpus import COMPLETION_LENGTH
from ppo_demo.lm.model import PolicyValueModel
from ppo_demo.lm.rollout import Completions, sample
from ppo_demo.lm.step import next_token_log_probs


def best_of_n(
    policy: PolicyValueModel,
    score: Callable[[Tensor], Tensor],
    prompts: Tensor,
    n: int,
    generator: torch.Generator,
) -> Completions:
    """Write n completions of each prompt and keep the one that scores best.

    Parameters
    ----------
    policy : PolicyValueModel
        Writes.
    score : callable
        Maps tokens, shape (batch, time), to scores, shape (batch,).
    prompts : int64 tensor, shape (count, prompt)
        Prompts.
    n : int
        Completions of each, at least 1.
    generator : torch.Generator
        Source of chance.

    Returns
    -------
    Completions
        The best of each prompt; of equals the first. One that scores NaN is never chosen.

    Raises
    ------
    ValueError
        If `n` is below 1, or all completions of a prompt score NaN.
    """
    whole(n=n)
    at_least(1, n=n)
    written = sample(
        policy, prompts.repeat_interleave(n, 0), generator, max_tokens=COMPLETION_LENGTH
    )
    scores = score(written.tokens).view(-1, n)
    scored = (~scores.isnan()).any(-1)
    require("score", scores, scored, "a number for one completion of each prompt at least")
    highest, best = scores.where(~scores.isnan(), -torch.inf).max(-1)
    best = torch.where(highest == -torch.inf, (~scores.isnan()).int().argmax(-1), best)
    rows = torch.arange(len(prompts)) * n + best
    return written.rows(rows)


def best_of_n_kl(
    policy: PolicyValueModel,
    score: Callable[[Tensor], Tensor],
    prompts: Tensor,
    sizes: Sequence[int],
    generator: torch.Generator,
    *,
    samples: int = 4096,
) -> list[float]:
    """Measure the KL divergence of best-of-n from the policy that it samples.

    Completions of the policy stand for those of best-of-n, weighted by the ratio of the two.
    Their probabilities are the policy's own, so equal texts are seen for what they are; only how
    many score lower is an estimate.

    Parameters
    ----------
    policy, score
        As for `best_of_n`.
    prompts : int64 tensor, shape (count, prompt)
        The divergence is the mean over them.
    sizes : sequence of int
        Values of n, far below `samples`.
    generator : torch.Generator
        Source of chance.
    samples : int
        Completions of each prompt.

    Returns
    -------
    list of float
        For each size, in nats a completion.

    Raises
    ------
    ValueError
        If a size is not from 1 to `samples`, or a score is NaN.
    """
    whole(samples=samples)
    for n in sizes:
        whole(sizes=n)
        require("sizes", n, 1 <= n <= samples, f"from 1 to samples={samples}")
    found = []
    for prompt in prompts:
        asked = prompt.expand(samples, -1)
        written = sample(policy, asked, generator, max_tokens=COMPLETION_LENGTH)
        scores = score(written.tokens).double()
        require("score", scores, ~scores.isnan(), "a number for every completion")
        ranked = scores.sort().values
        own = written.log_probs.double().sum(-1).exp()
        below = torch.searchsorted(ranked, scores) / samples
        below = torch.minimum(below.double(), 1 - own)
        logs = [best_of_n_log_ratio(below, own, n) for n in sizes]
        weights = [log.exp() / log.exp().sum() for log in logs]
        found.append([(w * log).sum().item() for w, log in zip(weights, logs, strict=True)])
    return torch.tensor(found).mean(0).tolist()


def rejection_fine_tuning(
    policy: PolicyValueModel,
    chosen: Completions,
    generator: torch.Generator,
    *,
    epochs: int = 2,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
) -> PolicyValueModel:
    """Train a copy of the policy on chosen completions, by maximum likelihood.

    Parameters
    ----------
    policy : PolicyValueModel
        Where to start; it is not changed.
    chosen : Completions
        For example the best of n.
    generator : torch.Generator
        Fixes their order.
    epochs, batch_size : int
        Passes over them, and completions a step.
    learning_rate : float
        Of Adam.

    Returns
    -------
    PolicyValueModel
        The fine-tuned policy.
    """
    tuned = copy.deepcopy(policy)
    optimizer = torch.optim.Adam(tuned.parameters(), lr=learning_rate)
    for _ in range(epochs):
        for rows in torch.randperm(len(chosen.tokens), generator=generator).split(batch_size):
            tokens = chosen.tokens[rows]
            logs = next_token_log_probs(tuned(tokens[:, :-1])[0], tokens)
            loss = -masked_mean(logs, chosen.mask[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return tuned
