"""Before reinforcement learning: the supervised start and the reward model."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ppo_demo.aggregation import masked_mean
from ppo_demo.lm.corpus import (
    COMPLETION_LENGTH,
    MAX_LENGTH,
    PAD,
    PROMPT_LENGTH,
    VOCABULARY,
    gold_reward,
    prompts,
    sentences,
)
from ppo_demo.lm.model import ModelConfig, PolicyValueModel
from ppo_demo.lm.rollout import sample
from ppo_demo.lm.step import next_token_log_probs

POLICY = ModelConfig(len(VOCABULARY), MAX_LENGTH, padding=PAD)
SCORER = ModelConfig(len(VOCABULARY), MAX_LENGTH, layers=1, heads=2, width=32)
LABEL_TEMPERATURE = 0.5
"""Noise of the preferences: a gold reward higher by this wins with probability 0.73."""


def seeded(config: ModelConfig, seed: int) -> PolicyValueModel:
    """Return an untrained model; the seed fixes its weights and nothing else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PolicyValueModel(config)


def supervised_start(
    seed: int = 0, *, count: int = 6000, epochs: int = 8, batch_size: int = 250
) -> PolicyValueModel:
    """Train a policy to write reviews as people do, by maximum likelihood.

    Parameters
    ----------
    seed : int
        Fixes weights, sentences and their order.
    count, epochs, batch_size : int
        Sentences, passes over them, and sentences a step.

    Returns
    -------
    PolicyValueModel
        The policy before reinforcement learning; also the reference.
    """
    generator = torch.Generator().manual_seed(seed)
    model = seeded(POLICY, seed)
    corpus = sentences(count, generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    steps = epochs * (count // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(count, generator=generator).split(batch_size)[
            : count // batch_size
        ]:
            tokens = corpus[rows]
            mask = tokens[:, 1:] != PAD
            mask[:, : PROMPT_LENGTH - 1] = False
            loss = -masked_mean(next_token_log_probs(model(tokens[:, :-1])[0], tokens), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model


class RewardModel:
    """Scores reviews; a smaller transformer that read preferences.

    Parameters
    ----------
    scorer : PolicyValueModel
        Its value at the last token is the raw score.
    mean, deviation : float
        Of the raw score on the reference policy's reviews: scores are in these units, so that
        the reference has mean 0 and deviation 1.
    """

    def __init__(self, scorer: PolicyValueModel, mean: float = 0.0, deviation: float = 1.0) -> None:
        self.scorer, self.mean, self.deviation = scorer, mean, deviation

    def raw(self, tokens: Tensor) -> Tensor:
        """Score before scaling; shape (batch,)."""
        last = (tokens != PAD).sum(-1) - 1
        values: Tensor = self.scorer(tokens)[1]
        return values.gather(1, last[:, None]).squeeze(1)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Score reviews, shape (batch, time), in deviations of the reference; shape (batch,)."""
        return (self.raw(tokens) - self.mean) / self.deviation


def preference_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    r"""Bradley–Terry loss of pairs: :math:`-\log \sigma(r_\mathrm{chosen} - r_\mathrm{rejected})`.

    Parameters
    ----------
    chosen, rejected : tensor, same shape
        Scores of the preferred and of the other completion.

    Returns
    -------
    scalar tensor
        The mean loss (Ouyang et al. 2022, equation 1, for pairs).
    """
    return -F.logsigmoid(chosen - rejected).mean()


@dataclass(frozen=True)
class RewardReport:
    """How good a reward model is, on pairs and reviews that it has not seen.

    Attributes
    ----------
    accuracy : float
        Share of unseen pairs with different gold rewards that it ranks as gold does.
    correlation : float
        With the gold reward, over the reference policy's reviews.
    """

    accuracy: float
    correlation: float


def train_reward_model(
    policy: PolicyValueModel,
    seed: int = 0,
    *,
    pairs: int = 4000,
    epochs: int = 8,
    batch_size: int = 200,
) -> tuple[RewardModel, RewardReport]:
    """Learn a reward model from noisy preferences between the policy's own reviews.

    Parameters
    ----------
    policy : PolicyValueModel
        Writes the pairs.
    seed : int
        Fixes weights, pairs and labels.
    pairs, epochs, batch_size : int
        Pairs, passes over them, and pairs a step.

    Returns
    -------
    RewardModel, RewardReport
        The model, and how good it is.
    """
    generator = torch.Generator().manual_seed(seed + 1000)
    held_out = 1000
    asked = prompts(pairs + held_out, generator).repeat_interleave(2, 0)
    written = sample(policy, asked, generator, max_tokens=COMPLETION_LENGTH).tokens
    first, second = written[0::2], written[1::2]
    margin = gold_reward(first) - gold_reward(second)
    likely = torch.sigmoid(margin / LABEL_TEMPERATURE)
    prefers_first = torch.rand(len(likely), generator=generator) < likely
    chosen = torch.where(prefers_first[:, None], first, second)
    rejected = torch.where(prefers_first[:, None], second, first)

    model = RewardModel(seeded(SCORER, seed))
    optimizer = torch.optim.Adam(model.scorer.parameters(), lr=3e-3, fused=True)
    for _ in range(epochs):
        for rows in torch.randperm(pairs, generator=generator).split(batch_size):
            scores = model.raw(torch.cat([chosen[rows], rejected[rows]])).chunk(2)
            loss = preference_loss(*scores)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        seen = model.raw(written[: 2 * pairs])
        model = RewardModel(model.scorer, seen.mean().item(), seen.std().item())
        ranked = (model(first[pairs:]) > model(second[pairs:])) == (margin[pairs:] > 0)
        clear = margin[pairs:] != 0
        unseen = written[2 * pairs :]
        both = torch.stack([model(unseen), gold_reward(unseen)])
        report = RewardReport(
            accuracy=ranked[clear].float().mean().item(),
            correlation=torch.corrcoef(both)[0, 1].item(),
        )
    return model, report
