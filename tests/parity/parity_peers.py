"""Our values and gradients against the field's libraries, on the same random arrays with masks.

Run by `nox -s parity`, in an environment of its own. Where a library differs by convention, the
test says how and matches it through our parameters.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import warnings
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from datasets import Dataset
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value.functional import generalized_advantage_estimate
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from ppo_demo.advantages import discounted_returns, gae, group_relative, leave_one_out, whiten
from ppo_demo.aggregation import masked_mean
from ppo_demo.algorithms import ALGORITHMS
from ppo_demo.diagnostics import approx_kl, clip_fraction, explained_variance
from ppo_demo.divergences import entropy
from ppo_demo.lm.step import next_token_log_probs
from ppo_demo.losses import policy_loss
from ppo_demo.surrogates import (
    CappedWeight,
    Clip,
    DualClip,
    importance_weight,
    probability_ratio,
    value_loss,
)

GENERATOR = np.random.default_rng(20261201)
TIGHT = {"rtol": 1e-4, "atol": 1e-6}


def normal(*shape, scale=1.0, dtype=torch.float32):
    return torch.tensor(GENERATOR.normal(size=shape) * scale, dtype=dtype)


def gradients(loss, module):
    found = torch.autograd.grad(loss, list(module.parameters()), materialize_grads=True)
    return [gradient.detach() for gradient in found]


def same_value_and_gradients(ours, theirs, module):
    torch.testing.assert_close(ours, theirs, **TIGHT)
    torch.testing.assert_close(gradients(ours, module), gradients(theirs, module), **TIGHT)


# --- GAE ----------------------------------------------------------------------------------------

ROWS, TIME = 5, 7
LENGTHS = torch.tensor([7, 1, 4, 6, 2])
MASK = torch.arange(TIME) < LENGTHS[:, None]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (1.0, 1.0)])
@pytest.mark.parametrize("truncated", [False, True])
def test_gae_against_torchrl(gamma, lam, truncated):
    """torchrl has no mask: `done` at the last token ends its episode; the rest is not compared.

    It multiplies γ by a mask of integers, which makes float32 of it: on float64 input it is off
    in the seventh digit, hence the tolerance.
    """
    rewards, values, after = (normal(ROWS, TIME, dtype=torch.float64) for _ in range(3))
    last = torch.arange(TIME) == LENGTHS[:, None] - 1
    following = torch.where(last, after, values.roll(-1, 1))
    ours, targets = gae(rewards, values, MASK, gamma, lam, after[last] if truncated else None)
    terminated = last & (not truncated)
    theirs, their_targets = generalized_advantage_estimate(
        gamma,
        lam,
        *(x[..., None] for x in (values, following, rewards, last, terminated)),
    )
    torch.testing.assert_close(ours[MASK], theirs[..., 0][MASK], **TIGHT)
    torch.testing.assert_close(targets[MASK], their_targets[..., 0][MASK], **TIGHT)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8)])
@pytest.mark.parametrize("truncated", [False, True])
def test_gae_and_returns_against_stable_baselines3(gamma, lam, truncated):
    """Its buffer is (time, environments) and ends all rows at once: compared on full rows."""
    box, discrete = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(3)
    buffer = RolloutBuffer(TIME, box, discrete, gae_lambda=lam, gamma=gamma, n_envs=ROWS)
    rewards, values = normal(ROWS, TIME), normal(ROWS, TIME)
    after = normal(ROWS)
    buffer.rewards[:], buffer.values[:] = rewards.T.numpy(), values.T.numpy()
    buffer.compute_returns_and_advantage(after, np.full(ROWS, float(not truncated)))
    full = torch.ones(ROWS, TIME)
    ours, returns = gae(rewards, values, full, gamma, lam, after if truncated else None)
    np.testing.assert_allclose(ours.T, buffer.advantages, **TIGHT)
    np.testing.assert_allclose(returns.T, buffer.returns, **TIGHT)


# --- PPO losses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_whole_step_against_stable_baselines3(normalize, value_clip):
    """One SGD step of its PPO, and the gradient of ours on the same batch.

    Conventions: its value loss is not halved (our weight is doubled), whitening has ddof 1, and
    its value clipping takes the clipped error where the papers' code takes the larger of both.
    So for clipped values the held predictions are compared through the plain loss.
    """
    count, weight_value, weight_entropy = 64, 0.5, 0.01
    environment = gymnasium.make("CartPole-v1")
    options = {"n_steps": count, "batch_size": count, "n_epochs": 1, "max_grad_norm": 1e9}
    model = PPO(
        "MlpPolicy",
        environment,
        learning_rate=1.0,
        ent_coef=weight_entropy,
        vf_coef=weight_value,
        normalize_advantage=normalize,
        clip_range_vf=value_clip,
        policy_kwargs={"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {}},
        device="cpu",
        seed=0,
        **options,
    )
    model.set_logger(__import__("stable_baselines3.common.logger").common.logger.Logger(None, []))
    buffer = model.rollout_buffer
    buffer.observations[:] = GENERATOR.normal(size=buffer.observations.shape)
    buffer.actions[:] = GENERATOR.integers(0, 2, size=buffer.actions.shape)
    for name in ("advantages", "returns", "values"):
        getattr(buffer, name)[:] = GENERATOR.normal(size=(count, 1))
    buffer.log_probs[:] = np.log(0.5) + 0.3 * GENERATOR.normal(size=(count, 1))
    buffer.full = True

    observations = torch.tensor(buffer.observations.reshape(count, 4))
    actions = torch.tensor(buffer.actions.reshape(count)).long()
    advantages, returns, old_values, old = (
        torch.tensor(getattr(buffer, name).reshape(count))
        for name in ("advantages", "returns", "values", "log_probs")
    )
    values, log_probs, _ = model.policy.evaluate_actions(observations, actions)
    logits = model.policy.get_distribution(observations).distribution.logits
    mask = torch.ones(count)
    if normalize:
        advantages = whiten(advantages, mask, ddof=1)
    ratio = probability_ratio(log_probs, old)
    policy = -masked_mean(Clip(0.2)(ratio, advantages), mask)
    held = values.flatten()
    if value_clip:
        held = old_values + (held - old_values).clamp(-value_clip, value_clip)
    value = masked_mean(value_loss(held, returns), mask)
    spread = masked_mean(entropy(logits), mask)
    loss = policy + 2 * weight_value * value - weight_entropy * spread
    ours = gradients(loss, model.policy)
    kl = approx_kl(log_probs, old, mask)

    before = [p.detach().clone() for p in model.policy.parameters()]
    model.train()
    theirs = [a - b for a, b in zip(before, model.policy.parameters(), strict=True)]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-3, atol=1e-5)
    logged = model.logger.name_to_value
    assert logged["train/policy_gradient_loss"] == pytest.approx(policy.item(), rel=1e-4, abs=1e-6)
    assert logged["train/value_loss"] == pytest.approx(2 * value.item(), rel=1e-4)
    assert logged["train/entropy_loss"] == pytest.approx(-spread.item(), rel=1e-4)
    # Its approx_kl is k3 of the same log-ratio.
    assert logged["train/approx_kl"] == pytest.approx(kl.item(), rel=1e-3)
    # Its clip fraction counts every ratio outside the range; ours those whose gradient is gone.
    outside = ((ratio - 1).abs() > 0.2).float().mean().item()
    assert logged["train/clip_fraction"] == pytest.approx(outside)
    assert clip_fraction(Clip(0.2), ratio, advantages, mask) <= outside
    explained = explained_variance(old_values, returns, mask)
    assert logged["train/explained_variance"] == pytest.approx(explained.item(), rel=1e-4)


@pytest.mark.parametrize("clip", [0.2, (0.2, 0.28)])
@pytest.mark.parametrize("value_clip", [None, 0.3])
def test_clip_ppo_loss_against_torchrl(clip, value_clip):
    """It has no mask: it sees the real tokens only. Its value loss is not halved."""
    width, actions = 6, 4
    policy, critic = nn.Linear(width, actions), nn.Linear(width, 1)
    actor = ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    peer = ClipPPOLoss(
        actor,
        ValueOperator(critic, in_keys=["observation"]),
        clip_epsilon=clip,
        entropy_bonus=False,
        critic_coeff=1.0,
        loss_critic_type="l2",
        normalize_advantage=False,
        clip_value=value_clip,
    )
    observation = normal(ROWS, TIME, width)
    action = torch.tensor(GENERATOR.integers(0, actions, (ROWS, TIME)))
    old = np.log(1 / actions) + normal(ROWS, TIME, scale=0.3)
    advantages, targets, old_values = (normal(ROWS, TIME) for _ in range(3))
    batch = TensorDict(
        {
            "observation": observation[MASK],
            "action": action[MASK],
            "action_log_prob": old[MASK],
            "advantage": advantages[MASK][:, None],
            "value_target": targets[MASK][:, None],
            "state_value": old_values[MASK][:, None],
        },
        [int(MASK.sum())],
    )
    theirs = peer(batch)

    logs = policy(observation).log_softmax(-1).gather(-1, action[..., None])[..., 0]
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    row = replace(ALGORITHMS["ppo"], clip=Clip(low, high))
    loss = policy_loss(row, logs, old, advantages, MASK)
    values = critic(observation)[..., 0]
    clipping = {} if value_clip is None else {"old_values": old_values, "clip_range": value_clip}
    value = 2 * masked_mean(value_loss(values, targets, **clipping), MASK)
    torch.testing.assert_close(loss, theirs["loss_objective"])
    torch.testing.assert_close(value, theirs["loss_critic"])
    for ours, other, module in (
        (loss, theirs["loss_objective"], policy),
        (value, theirs["loss_critic"], critic),
    ):
        if module is policy:
            parameters = list(peer.actor_network_params.values(True, True))
        else:
            parameters = list(peer.critic_network_params.values(True, True))
        found = {tuple(g.shape): g for g in torch.autograd.grad(other, parameters)}
        for gradient in gradients(ours, module):
            torch.testing.assert_close(gradient, found[tuple(gradient.shape)])


# --- TRL ------------------------------------------------------------------------------------------

PROMPT, LIMIT, WORDS = 3, 6, 11
COMPLETION_MASK = torch.arange(LIMIT) < torch.tensor([6, 2, 4, 1])[:, None]


def tokenizer():
    words = {"<pad>": 0, "<end>": 1, **{f"w{i}": i + 2 for i in range(WORDS - 2)}}
    fast = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<end>")


def make_trainer(kind, folder, rewards=None, **options):
    """A trainer over a GPT-2 that is built here; nothing is loaded from a hub."""
    torch.manual_seed(0)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    sizes = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drop, **ends))
    trainer_class, config_class = {
        "grpo": (GRPOTrainer, GRPOConfig),
        "rloo": (RLOOTrainer, RLOOConfig),
    }[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = config_class(
            output_dir=str(folder),
            beta=0.0,  # with a weight it would look for the reference on a hub
            report_to=[],
            use_cpu=True,
            bf16=False,
            num_generations=2,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=1,
            max_completion_length=LIMIT,
            **options,
        )
        trainer = trainer_class(
            model=model,
            args=arguments,
            processing_class=tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": ["w1 w2"] * 8}),
            reward_funcs=lambda completions, **_: rewards or [0.0] * len(completions),
        )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def batch():
    ids = torch.tensor(GENERATOR.integers(2, WORDS, (4, PROMPT + LIMIT)))
    return {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones(4, PROMPT, dtype=torch.long),
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": COMPLETION_MASK.long(),
        "advantages": normal(4),
        "old_per_token_logps": np.log(1 / WORDS) + normal(4, LIMIT, scale=0.25),
        "ref_per_token_logps": np.log(1 / WORDS) + normal(4, LIMIT, scale=0.25),
        "num_items_in_batch": COMPLETION_MASK.sum(),
    }


def completion_logs(model, inputs):
    """Log-probabilities of the completions' tokens, by the function that the book prints."""
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logits = model(input_ids=tokens, attention_mask=attention).logits
    return next_token_log_probs(logits, tokens)[:, PROMPT - 1 :]


# Our row, TRL's options.
GRPO_CASES = {
    "grpo": (ALGORITHMS["grpo"], {"loss_type": "grpo"}),
    "bnpo": (replace(ALGORITHMS["grpo"], aggregation="token"), {"loss_type": "bnpo"}),
    "dr_grpo": (ALGORITHMS["dr_grpo"], {"loss_type": "dr_grpo"}),
    "dapo": (ALGORITHMS["dapo"], {"loss_type": "dapo", "epsilon_high": 0.28}),
    "delta": (
        replace(ALGORITHMS["grpo"], clip=DualClip(0.2, dual_clip=1.4)),
        {"loss_type": "grpo", "delta": 1.4},
    ),
    "gspo": (
        replace(ALGORITHMS["gspo"], clip=Clip(0.03, 0.04)),
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.03,
            "epsilon_high": 0.04,
        },
    ),
    "luspo": (
        replace(ALGORITHMS["luspo"], clip=Clip(0.03, 0.04)),
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.03,
            "epsilon_high": 0.04,
        },
    ),
    # TRL's epsilon_high is the largest weight itself here, not its distance from 1.
    "cispo": (
        replace(ALGORITHMS["cispo"], clip=CappedWeight(1.2)),
        {"loss_type": "cispo", "epsilon_high": 1.2},
    ),
    "sapo": (ALGORITHMS["sapo"], {"loss_type": "sapo"}),
    "vespo": (ALGORITHMS["vespo"], {"loss_type": "vespo"}),
}


KL_TERMS = ("none", "k3", "k3 times ratio")


@pytest.mark.parametrize(
    ("name", "kl"),
    # TRL weighs vespo's KL term by the token ratio, while the row's own is of whole completions.
    [(n, kl) for n in GRPO_CASES for kl in KL_TERMS if (n, kl) != ("vespo", "k3 times ratio")],
)
def test_each_loss_of_trl(name, kl, tmp_path):
    row, options = GRPO_CASES[name]
    weighted = kl == "k3 times ratio"
    trainer = make_trainer("grpo", tmp_path, use_bias_correction_kl=weighted, **options)
    arguments = {"length": LIMIT} if row.aggregation == "fixed" else {}
    if kl == "none":
        row = replace(row, kl="none", kl_estimator=None)
    else:
        trainer.beta = 0.07
        row = replace(row, kl="loss", kl_estimator="k3", kl_weighted=weighted)
        arguments["kl_weight"] = 0.07
    inputs = batch()
    theirs = trainer._compute_loss(trainer.model, inputs)
    ours = policy_loss(
        row,
        completion_logs(trainer.model, inputs),
        inputs["old_per_token_logps"],
        inputs["advantages"][:, None],
        COMPLETION_MASK,
        ref_log_probs=inputs["ref_per_token_logps"],
        **arguments,
    )
    same_value_and_gradients(ours, theirs, trainer.model)


def test_trl_clip_ratio_is_our_clip_fraction(tmp_path):
    trainer = make_trainer("grpo", tmp_path, loss_type="bnpo")
    inputs = batch()
    trainer._compute_loss(trainer.model, inputs)
    logs = completion_logs(trainer.model, inputs)
    ratio = probability_ratio(logs, inputs["old_per_token_logps"], COMPLETION_MASK)
    advantages = inputs["advantages"][:, None].expand(ratio.shape)
    ours = clip_fraction(Clip(0.2), ratio, advantages, COMPLETION_MASK)
    theirs = trainer._metrics["train"]["clip_ratio/region_mean"][-1]
    assert ours.item() == pytest.approx(theirs, rel=1e-5)
    assert ours > 0


def test_truncated_importance_sampling_against_trl(tmp_path):
    """TRL computes the weight while it samples, and multiplies each token's loss by it."""
    trainer = make_trainer("grpo", tmp_path, loss_type="grpo")
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    inputs = batch()
    sampler = inputs["old_per_token_logps"] + normal(4, LIMIT, scale=0.5)
    weight = importance_weight(inputs["old_per_token_logps"], sampler, 1.5)
    inputs["importance_sampling_ratio"] = weight
    theirs = trainer._compute_loss(trainer.model, inputs)
    ours = policy_loss(
        ALGORITHMS["grpo"],
        completion_logs(trainer.model, inputs),
        inputs["old_per_token_logps"],
        inputs["advantages"][:, None],
        COMPLETION_MASK,
        sampler_log_probs=sampler,
        sampler_cap=1.5,
    )
    torch.testing.assert_close(ours, theirs, **TIGHT)
    assert (weight == 1.5).any()


def test_rloo_loss_against_trl(tmp_path):
    """TRL clips the ratio of the whole completion; the paper's RLOO has no ratio."""
    trainer = make_trainer("rloo", tmp_path)
    inputs = batch()
    inputs["old_logps"] = (inputs["old_per_token_logps"] * COMPLETION_MASK).sum(-1)
    theirs = trainer._compute_loss(trainer.model, inputs)
    row = replace(ALGORITHMS["rloo"], ratio="product", clip=Clip(0.2), aggregation="sequence")
    ours = policy_loss(
        row,
        completion_logs(trainer.model, inputs),
        inputs["old_per_token_logps"],
        inputs["advantages"][:, None],
        COMPLETION_MASK,
    )
    same_value_and_gradients(ours, theirs, trainer.model)


REWARDS = [1.0, 0.0, 0.3, 0.7]


@pytest.mark.parametrize("rewards", [REWARDS, [1.0, None, 0.3, 0.7], [0.5, 0.5, 1.0, 0.0]])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_against_trl(scale, rewards, tmp_path):
    """TRL samples and scores; a reward of None leaves the completion out of its group."""
    trainer = make_trainer("grpo", tmp_path, rewards, scale_rewards=scale)
    found = trainer._generate_and_score_completions([{"prompt": "w1 w2"}] * 4)["advantages"]
    valid = torch.tensor([[r is not None for r in rewards[i : i + 2]] for i in (0, 2)])
    scores = torch.tensor([0.0 if r is None else r for r in rewards]).reshape(2, 2)
    if None in rewards and scale == "group":
        # One completion has no deviation: TRL turns the NaN into 0, ours says so.
        assert found[0] == found[1] == 0
        with pytest.raises(ValueError, match="more than ddof=1 valid completions"):
            group_relative(scores, valid, scale=scale)
        return
    ours = group_relative(scores, valid, scale=scale)
    torch.testing.assert_close(ours.flatten(), found, **TIGHT)


def test_leave_one_out_against_trl(tmp_path):
    trainer = make_trainer("rloo", tmp_path, REWARDS, num_generations_eval=4)
    trainer.num_generations = 4
    found = trainer._generate_and_score_completions([{"prompt": "w1 w2"}] * 4)["advantages"]
    torch.testing.assert_close(leave_one_out(torch.tensor([REWARDS])).flatten(), found, **TIGHT)


def test_returns_are_gae_without_a_critic():
    """The mask alone ends a completion: torchrl with `done` at its last token gives the same."""
    rewards = normal(ROWS, TIME, dtype=torch.float64)
    last = torch.arange(TIME) == LENGTHS[:, None] - 1
    zeros = torch.zeros_like(rewards)
    theirs, _ = generalized_advantage_estimate(
        0.9, 1.0, *(x[..., None] for x in (zeros, zeros, rewards, last, last))
    )
    ours = discounted_returns(rewards, MASK, 0.9)
    torch.testing.assert_close(ours[MASK], theirs[..., 0][MASK], **TIGHT)
