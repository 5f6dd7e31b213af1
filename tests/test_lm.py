"""The PPO step and the faults of the circulating one, against loops and closed forms."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ppo_demo.divergences import categorical_kl
from ppo_demo.lm import coins, corpus, pitfalls
from ppo_demo.lm.model import ModelConfig, PolicyValueModel, cached_attention
from ppo_demo.lm.step import descend, next_token_log_probs, used_positions
from ppo_demo.losses import losses


@pytest.fixture
def sampled():
    model = coins.new_model(3)
    return model, coins.rollout(model, coins.new_model(4), 16, torch.Generator().manual_seed(5))


def moved(model):
    """The model after a small random step, so that ratios differ from 1."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def step_losses(model, batch):
    """What `coins.ppo_step` descends: policy loss, value loss and KL."""
    logits, values = model(batch.tokens)
    log_probs = next_token_log_probs(logits, batch.tokens)
    kl = categorical_kl(logits[:, :-1], batch.ref_logits, batch.mask)
    found = losses(coins.PPO, batch, log_probs, values[:, :-1], kl=kl)
    return found.policy, found.value, found.kl


def test_losses_agree_with_a_loop_over_tokens(sampled):
    model, rollout = sampled
    batch = rollout.batch
    logits, values = moved(model)(batch.tokens)
    policy = value = kl = count = 0.0
    for row in range(16):
        for t in range(batch.tokens.shape[1] - 1):
            in_completion = t + 1 >= coins.PROMPT_LENGTH
            if not in_completion or batch.tokens[row, t + 1] == coins.PAD:
                continue
            log_p = logits[row, t] - logits[row, t].exp().sum().log()
            log_ref = batch.ref_logits[row, t] - batch.ref_logits[row, t].exp().sum().log()
            token = batch.tokens[row, t + 1]
            ratio = math.exp(log_p[token].item() - batch.old_log_probs[row, t].item())
            advantage = batch.advantages[row, t].item()
            policy -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            value += (values[row, t].item() - rollout.rewards[row].item()) ** 2 / 2
            pair = (log_p.tolist(), log_ref.tolist())
            kl += sum(math.exp(a) * (a - b) for a, b in zip(*pair, strict=True))
            count += 1
    found = [loss.item() for loss in step_losses(model, batch)]
    assert found == pytest.approx([policy / count, value / count, kl / count], rel=1e-4)


def test_log_probs_are_of_the_next_token():
    logits = torch.log(torch.tensor([[[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]]]))
    log_probs = next_token_log_probs(logits, torch.tensor([[0, 1, 0]]))
    assert log_probs.exp().tolist() == [pytest.approx([0.1, 0.2])]


def test_padding_and_prompt_do_not_reach_the_losses(sampled):
    model, rollout = sampled
    batch = rollout.batch
    moved(model)
    garbled = replace(
        batch,
        old_log_probs=batch.old_log_probs.masked_fill(~batch.mask, -math.inf),
        ref_logits=batch.ref_logits.masked_fill(~batch.mask[..., None], math.nan),
        advantages=batch.advantages.masked_fill(~batch.mask, math.nan),
        returns=batch.returns.masked_fill(~batch.mask, 1e30),
    )
    clean, dirty = (step_losses(model, b) for b in (batch, garbled))
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)
    parameters = list(model.parameters())
    for a, b in zip(clean, dirty, strict=True):
        options = {"retain_graph": True, "materialize_grads": True}
        expected = torch.autograd.grad(a, parameters, **options)
        torch.testing.assert_close(torch.autograd.grad(b, parameters, **options), expected)


def test_first_ratio_is_one_so_the_policy_loss_is_the_mean_advantage(sampled):
    model, rollout = sampled
    policy, _, _ = step_losses(model, rollout.batch)
    mean = rollout.batch.advantages[rollout.batch.mask].mean()
    assert policy.item() == pytest.approx(-mean.item(), abs=1e-6)


def test_step_clips_the_gradient_and_reports(sampled):
    model, rollout = sampled
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    norm = descend(step_losses(model, rollout.batch)[1], model, optimizer, max_grad_norm=0.01)
    moves = [(a - b).norm() ** 2 for a, b in zip(model.parameters(), before, strict=True)]
    assert norm > 0.01
    assert sum(moves).sqrt().item() == pytest.approx(0.01, rel=1e-3)
    metrics = coins.ppo_step(model, optimizer, rollout)
    assert set(metrics) == {"policy_loss", "value_loss", "kl", "grad_norm"}


def test_no_position_sees_a_later_one():
    model = PolicyValueModel(ModelConfig(vocabulary=7, context=6, layers=2, width=16, heads=2))
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    changed = tokens.clone()
    changed[0, 4:] = 0
    for a, b in zip(model(tokens), model(changed), strict=True):
        torch.testing.assert_close(a[:, :4], b[:, :4])
        assert not torch.allclose(a[:, 4:], b[:, 4:])


@pytest.mark.parametrize("time", [1, 5, 15, 16, 20])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_is_that_of_the_library(time, padded):
    generator = torch.Generator().manual_seed(time)
    heads = torch.randn(3, time, 3, 4, 8, generator=generator, requires_grad=True)
    weights = torch.randn(3, time, 32, generator=generator)
    query, key, value = heads.permute(2, 0, 3, 1, 4)
    theirs = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    theirs = theirs.transpose(1, 2).flatten(2)
    model = PolicyValueModel(ModelConfig(vocabulary=5, context=20, width=32))
    used = torch.arange(time) < torch.tensor([time, 1, max(1, time - 2)])[:, None]
    cache = torch.full((20, 2, 3, 4, 8), torch.nan)
    if padded:
        mine = model.attention(used, 3, time)(heads[used], cache=None)
        theirs, weights = theirs[used], weights[used]
    else:
        mine = model.attention(None, 3, time)(heads.flatten(0, 1), cache=cache).view(3, time, -1)
    torch.testing.assert_close(mine, theirs)
    gradients = [torch.autograd.grad((x * weights).sum(), heads)[0] for x in (mine, theirs)]
    torch.testing.assert_close(*gradients)
    if not padded:
        torch.testing.assert_close(cache[:time], heads[:, :, 1:].permute(1, 2, 0, 3, 4))
        last = cached_attention(heads[:, -1], cache, start=time - 1)
        torch.testing.assert_close(last, theirs[:, -1])


def test_positions_that_are_not_used_change_nothing_and_cost_nothing():
    model = PolicyValueModel(ModelConfig(vocabulary=9, context=8, layers=2, width=16, heads=2))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(9, (4, 6), generator=generator)
    mask = torch.arange(6) < torch.tensor([3, 1, 6, 4])[:, None]
    mask[2, :3] = False  # a prompt: not of the completion, but read by it
    used = used_positions(mask)
    assert used.sum(-1).tolist() == [3, 1, 6, 4]
    rows = []
    hook = model.blocks[0].register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    whole, part = model(tokens), model(tokens, used)
    hook.remove()
    assert rows == [24, 14]
    for a, b in zip(whole, part, strict=True):
        torch.testing.assert_close(b[used], a[used])
        assert (b[~used] == 0).all()
    parameters = list(model.parameters())
    gradients = [
        torch.autograd.grad(logits[used].square().sum() + values[used].sum(), parameters)
        for logits, values in (whole, part)
    ]
    torch.testing.assert_close(*gradients)


def test_cache_takes_one_token_after_the_start():
    model = PolicyValueModel(ModelConfig(vocabulary=5, context=8))
    tokens = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match="tokens must be one a sequence at start=2, got 3"):
        model(tokens, cache=model.new_cache(1), start=2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"width": 30}, "width must be a multiple of heads=4, got 30"),
    ],
)
def test_bad_model_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"vocabulary": 5, "context": 5, **sizes})


def test_coins_are_counted_in_the_completion_alone():
    model = coins.new_model(0)
    rollout = coins.rollout(model, model, 200, torch.Generator().manual_seed(0))
    tokens = rollout.batch.tokens
    assert tokens.shape == (200, coins.PROMPT_LENGTH + coins.COMPLETION_LENGTH)
    counts = (tokens[:, coins.PROMPT_LENGTH :] == coins.COIN).sum(-1)
    assert rollout.rewards.tolist() == counts.tolist()
    assert (tokens[:, : coins.PROMPT_LENGTH] == coins.COIN).any()
    assert (coins.PAD, coins.END) == (corpus.PAD, corpus.END)


@pytest.fixture(scope="module", params=range(5))
def faults(request):
    model = coins.new_model(request.param)
    rollout = coins.rollout(model, model, 256, torch.Generator().manual_seed(request.param))
    found = {
        fault: pitfalls.gradients(model, rollout.batch, rollout.old_logits, losses)
        for fault, losses in pitfalls.FAULTS.items()
    }
    right = found["none"]
    return {
        fault: [pitfalls.compare(g, r) for g, r in zip(pair, right, strict=True)]
        for fault, pair in found.items()
    }


def test_first_three_faults_turn_the_gradient(faults):
    for fault in list(pitfalls.FAULTS)[1:4]:
        (cosine, _), _ = faults[fault]
        assert cosine < 0.7, fault
    assert abs(faults["ratio over the whole vocabulary"][0][0]) < 0.5


def test_one_half_twice_halves_the_value_gradient_and_nothing_else(faults):
    policy, value = faults["one half twice on the value loss"]
    assert policy == pytest.approx((1, 1), abs=1e-5)
    assert value == pytest.approx((1, 0.5), abs=1e-5)


def test_whole_vocabulary_gradient_does_not_know_what_was_sampled(sampled):
    """At the first update it is -A (1/V - p) on every logit, whichever token was taken."""
    model, rollout = sampled
    batch, old = rollout.batch, rollout.old_logits
    logits = old.clone().requires_grad_()
    fault = pitfalls.FAULTS["ratio over the whole vocabulary"]
    fault(logits, model(batch.tokens)[1], batch, old).policy.backward()
    share = torch.where(batch.mask, batch.advantages, 0.0) / batch.mask.sum()
    expected = -share[..., None] * (1 / len(coins.VOCABULARY) - old[:, :-1].softmax(-1))
    torch.testing.assert_close(logits.grad[:, :-1], expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_right_step_learns_and_circulating_step_does_not(seed):
    right = [m["reward"] for m in coins.train(20, seed)[1]]
    runs = coins.train(20, seed, step=pitfalls.circulating_step)[1]
    wrong = [m["reward"] for m in runs]
    assert right[0] == wrong[0] < 1
    assert right[-1] > 7.5
    assert wrong[-1] < wrong[0]
    assert runs[-1]["loss"] < runs[0]["loss"]


def test_training_is_reproducible():
    assert coins.train(2, seed=1)[1] == coins.train(2, seed=1)[1]
