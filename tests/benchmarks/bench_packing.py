"""What packing gains: the gradient steps of a batch with and without padding, in one run."""

import statistics
import time

import pytest
import torch

from ppo_demo.lm.corpus import END
from ppo_demo.lm.pretrain import POLICY, seeded
from ppo_demo.lm.trainer import TrainConfig, Trainer


@pytest.mark.parametrize("pull", [0.5, 2.5])
def test_gain_of_packing(pull):
    """The pull towards the end token sets how short the completions are."""
    torch.set_num_threads(2)
    reference = seeded(POLICY, 0)
    with torch.no_grad():
        reference.offset[END] = pull
    trainers = {}
    for packing in (False, True):
        config = TrainConfig(packing=packing, kl_weight=0.0)
        trainers[packing] = Trainer(config, reference, lambda t: (t % 2 == 0).sum(-1).float())
    batch, metrics = trainers[False].rollout()
    rows = batch.rows(torch.arange(64))
    times = {False: [], True: []}
    for _ in range(60):  # in turn, so that both see the same machine
        for packing, trainer in trainers.items():
            start = time.perf_counter()
            loss, _ = trainer.loss(rows)
            loss.backward()
            times[packing].append(time.perf_counter() - start)
    padded, packed = (statistics.median(times[k][10:]) for k in (False, True))
    share = batch.mask.float().mean().item()
    print(
        f"\ncompletions of {metrics['length']:.1f} tokens on average ({share:.0%} of the room): "
        f"padded {padded * 1e3:.1f} ms, packed {packed * 1e3:.1f} ms a gradient step: "
        f"{padded / packed:.2f} times faster"
    )
