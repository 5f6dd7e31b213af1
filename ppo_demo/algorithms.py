"""Every variant of the field as a row of one table.

A new one is a row with other fields::

    from dataclasses import replace

    mine = replace(ALGORITHMS["grpo"], name="mine", aggregation="token", clip=Clip(0.2, 0.3))
"""

from collections.abc import Mapping
from types import MappingProxyType

from ppo_demo.losses import Algorithm
from ppo_demo.surrogates import CappedWeight, Clip, GammaWeight, SoftGate, Unclipped

_ROWS = (
    Algorithm(
        name="REINFORCE",
        paper="williams1992reinforce",
        advantage="batch_mean",
        ratio="none",
        clip=Unclipped(),
        aggregation="sum",
        kl="reward",
    ),
    Algorithm(
        name="RLOO",
        paper="ahmadian2024rloo",
        advantage="leave_one_out",
        ratio="none",
        clip=Unclipped(),
        aggregation="sum",
        kl="reward",
    ),
    Algorithm(
        name="PPO",
        paper="schulman2017ppo",
        advantage="gae",
        ratio="token",
        clip=Clip(0.2),
        aggregation="token",
        kl="reward",
    ),
    Algorithm(
        name="GRPO",
        paper="shao2024deepseekmath",
        advantage="group_std",
        ratio="token",
        clip=Clip(0.2),
        aggregation="sequence",
        kl="loss",
        kl_estimator="k3",
    ),
    Algorithm(
        name="Dr. GRPO",
        paper="liu2025drgrpo",
        advantage="group_mean",
        ratio="token",
        clip=Clip(0.2),
        aggregation="fixed",
    ),
    Algorithm(
        name="DAPO",
        paper="yu2025dapo",
        advantage="group_std",
        ratio="token",
        clip=Clip(0.2, 0.28),
        aggregation="token",
    ),
    Algorithm(
        name="GSPO",
        paper="zheng2025gspo",
        advantage="group_std",
        ratio="sequence",
        clip=Clip(3e-4, 4e-4),
        aggregation="sequence",
    ),
    Algorithm(
        name="LUSPO",
        paper="liu2026luspo",
        advantage="group_std",
        ratio="sequence",
        clip=Clip(3e-4, 4e-4),
        aggregation="sum",
    ),
    Algorithm(
        name="CISPO",
        paper="minimax2025m1",
        advantage="group_std",
        ratio="token",
        clip=CappedWeight(5.0),
        aggregation="token",
    ),
    Algorithm(
        name="SAPO",
        paper="gao2025sapo",
        advantage="group_std",
        ratio="token",
        clip=SoftGate(1.0, 1.05),
        aggregation="sequence",
    ),
    Algorithm(
        name="VESPO",
        paper="shen2026vespo",
        advantage="group_std",
        ratio="product",
        clip=GammaWeight((2.0, 3.0), (3.0, 2.0)),
        aggregation="token",
    ),
    Algorithm(
        name="MaxRL",
        paper="tajwar2026maxrl",
        advantage="mean_relative",
        ratio="token",
        clip=Clip(0.2),
        aggregation="token",
    ),
)

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {row.name.lower().replace(". ", "_"): row for row in _ROWS}
)
"""The field's variants by their lower-case name: ``"reinforce"``, ``"ppo"``, ``"dr_grpo"`` …"""
