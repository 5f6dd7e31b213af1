"""Where training runs start: a supervised policy and its reward model, also as bytes to send."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ppo_demo.lm.model import PolicyValueModel
from ppo_demo.lm.pretrain import (
    POLICY,
    SCORER,
    RewardModel,
    seeded,
    supervised_start,
    train_reward_model,
)


def start(seed: int) -> tuple[PolicyValueModel, RewardModel]:
    """Return supervised start and reward model of a seed."""
    policy = supervised_start(seed)
    return policy, train_reward_model(policy, seed)[0]


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: sums are then added up in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pack_start(policy: PolicyValueModel, reward_model: RewardModel) -> bytes:
    """Return a supervised start and its reward model as bytes; see `unpack_start`."""
    buffer = io.BytesIO()
    weights = {"policy": policy.state_dict(), "scorer": reward_model.scorer.state_dict()}
    scale = {"mean": reward_model.mean, "deviation": reward_model.deviation}
    torch.save({**weights, **scale}, buffer)
    return buffer.getvalue()


def unpack_start(packed: bytes) -> tuple[PolicyValueModel, RewardModel]:
    """Return what `pack_start` was given."""
    kept = torch.load(io.BytesIO(packed), weights_only=True)
    policy, scorer = seeded(POLICY, 0), seeded(SCORER, 0)
    policy.load_state_dict(kept["policy"])
    scorer.load_state_dict(kept["scorer"])
    return policy, RewardModel(scorer, kept["mean"], kept["deviation"])


def make_start(seed: int) -> bytes:
    """Train the supervised start and the reward model of a seed, with one thread."""
    with one_thread():
        return pack_start(*start(seed))
