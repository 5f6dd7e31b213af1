"""What leaving out padding gains: a model's pass over a batch with and without, in one run."""

import statistics
import time

import pytest
import torch

from ppo_demo.lm.corpus import END
from ppo_demo.lm.pretrain import POLICY, seeded
from ppo_demo.lm.step import used_positions
from ppo_demo.lm.trainer import TrainConfig, Trainer


@pytest.mark.parametrize("pull", [0.5, 2.5])
def test_gain_of_leaving_out_padding(pull):
    """The pull towards the end token sets how short the completions are."""
    torch.set_num_threads(2)
    policy = seeded(POLICY, 0)
    with torch.no_grad():
        policy.offset[END] = pull
    trainer = Trainer(TrainConfig(), policy, lambda t: (t % 2 == 0).sum(-1).float())
    batch, metrics = trainer.rollout()
    rows = batch.rows(torch.arange(64))
    used = used_positions(rows.mask)
    times = {"all": [], "used": []}
    for _ in range(60):  # in turn, so that both see the same machine
        for name, chosen in (("all", None), ("used", used)):
            start = time.perf_counter()
            logits, values = policy(rows.tokens[:, :-1], chosen)
            (logits[used].square().sum() + values[used].sum()).backward()
            times[name].append(time.perf_counter() - start)
    every, part = (statistics.median(found[10:]) for found in times.values())
    print(
        f"\ncompletions of {metrics['length']:.1f} tokens on average ({used.float().mean():.0%} of "
        f"the positions are used): all {every * 1e3:.1f} ms, used {part * 1e3:.1f} ms a pass and "
        f"its gradient: {every / part:.2f} times faster"
    )
