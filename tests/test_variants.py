"""The mathematics of the variants as properties: what must hold on any input."""

import math
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ppo_demo.advantages import (
    discounted_returns,
    gae,
    group_relative,
    leave_one_out,
    td_residuals,
)
from ppo_demo.aggregation import aggregate
from ppo_demo.algorithms import ALGORITHMS
from ppo_demo.diagnostics import approx_kl, clip_fraction, explained_variance
from ppo_demo.divergences import (
    adaptive_kl_weight,
    best_of_n_kl_bound,
    best_of_n_log_ratio,
    categorical_kl,
    entropy,
    kl_estimate,
    linear_kl_weight,
)
from ppo_demo.losses import Algorithm, Batch, completion_advantages, losses, policy_loss
from ppo_demo.surrogates import (
    CappedWeight,
    Clip,
    DualClip,
    GammaWeight,
    SoftGate,
    importance_weight,
    probability_ratio,
    sequence_ratio,
    value_loss,
)

settings.register_profile("book", deadline=None, max_examples=60)
settings.load_profile("book")

ROWS = [pytest.param(row, id=key) for key, row in ALGORITHMS.items()]
floats = st.floats(-3, 3, allow_subnormal=False)
unit = st.floats(0, 1, allow_subnormal=False)


@st.composite
def batches(draw, low=-2.0, high=2.0):
    """Log-probabilities of completions with padding: new, old and reference; one mask each."""
    rows, time = draw(st.integers(2, 4)), draw(st.integers(2, 5))
    shape = (rows, time)
    lengths = draw(st.lists(st.integers(1, time), min_size=rows, max_size=rows))
    mask = np.arange(time) < np.array(lengths)[:, None]
    make = arrays(np.float64, shape, elements=st.floats(low, high, allow_subnormal=False))
    new, old, ref = (draw(make) - 2 for _ in range(3))
    advantages = draw(arrays(np.float64, (rows, 1), elements=floats))
    return tuple(torch.from_numpy(x) for x in (new, old, ref, advantages, mask))


def loss_and_gradient(row, new, old, advantages, mask, ref=None, **options):
    leaf = new.clone().requires_grad_()
    if row.kl == "loss" and ref is not None:
        options |= {"ref_log_probs": ref, "kl_weight": 0.1}
    if row.aggregation == "fixed":
        options["length"] = 8
    loss = policy_loss(row, leaf, old, advantages, mask, **options)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


# --- padding, order, extremes ---------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS)
@given(batch=batches(), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_anything_on_padding_changes_nothing(row, batch, garbage):
    new, old, ref, advantages, mask = batch
    wide = advantages.expand(new.shape)
    clean = loss_and_gradient(row, new, old, wide, mask, ref, sampler_log_probs=old)
    new, old, ref, wide = (torch.where(mask, x, garbage) for x in (new, old, ref, wide))
    dirty = loss_and_gradient(row, new, old, wide, mask, ref, sampler_log_probs=old)
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)
    assert torch.isfinite(dirty[1]).all()
    assert (dirty[1][~mask] == 0).all()


@given(batches(), st.sampled_from([math.nan, math.inf]))
def test_anything_on_padding_changes_no_divergence_and_no_diagnostic(batch, garbage):
    new, old, ref, advantages, mask = batch
    wide = advantages.expand(new.shape)
    logits = torch.stack([new, old, ref], -1)

    def everything(new, old, wide, logits):
        return [
            categorical_kl(logits, logits.flip(-1), mask),
            entropy(logits, mask),
            *(kl_estimate(new, old, k, mask) for k in ("k1", "k2", "k3")),
            approx_kl(new, old, mask),
            explained_variance(new, old, mask),
            *gae(new, old, mask),
            value_loss(new, old, wide, 0.2, mask),
            probability_ratio(new, old, mask),
        ]

    clean = everything(new, old, wide, logits)
    new, old, wide = (torch.where(mask, x, garbage) for x in (new, old, wide))
    logits = torch.where(mask[..., None], logits, garbage)
    torch.testing.assert_close(
        everything(new, old, wide, logits), clean, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("row", ROWS)
@given(batch=batches(), data=st.data())
def test_order_of_completions_does_not_matter(row, batch, data):
    order = data.draw(st.permutations(range(len(batch[0]))))
    new, old, ref, advantages, mask = batch
    loss, gradient = loss_and_gradient(row, new, old, advantages, mask, ref)
    shuffled = loss_and_gradient(
        row, new[order], old[order], advantages[order], mask[order], ref[order]
    )
    torch.testing.assert_close(shuffled, (loss, gradient[order]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("row", ROWS)
def test_extreme_log_ratios_give_no_nan(row, dtype):
    new = torch.tensor([[-100.0, 0.0, -50.0], [0.0, -100.0, -1.0]], dtype=dtype)
    old = torch.tensor([[0.0, -100.0, -50.0], [0.0, 0.0, -100.0]], dtype=dtype)
    mask = torch.ones(2, 3, dtype=torch.bool)
    for sign in (1, -1):
        advantages = torch.tensor([[1.0], [-1.0]], dtype=dtype) * sign
        loss, gradient = loss_and_gradient(row, new, old, advantages, mask, old)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


# --- returns and advantages -----------------------------------------------------------------------


@st.composite
def episodes(draw):
    rows, time = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    make = arrays(np.float64, (rows, time), elements=floats)
    lengths = draw(st.lists(st.integers(1, time), min_size=rows, max_size=rows))
    mask = np.arange(time) < np.array(lengths)[:, None]
    bootstrap = draw(st.none() | arrays(np.float64, (rows,), elements=floats))
    return draw(make), draw(make), mask, draw(unit), bootstrap


@given(episodes())
def test_returns_are_discounted_sums(episode):
    rewards, _, mask, gamma, bootstrap = episode
    returns = discounted_returns(rewards, mask, gamma, bootstrap)
    for row, length in enumerate(mask.sum(-1)):
        for t in range(rewards.shape[1]):
            expected = sum(gamma ** (k - t) * rewards[row, k] for k in range(t, length))
            if bootstrap is not None and t < length:
                expected += gamma ** (length - t) * bootstrap[row]
            assert returns[row, t] == pytest.approx(expected if t < length else 0, abs=1e-9)


@given(episodes())
def test_gae_at_lambda_one_is_return_less_value_and_at_zero_the_td_residual(episode):
    rewards, values, mask, gamma, bootstrap = episode
    returns = discounted_returns(rewards, mask, gamma, bootstrap)
    advantages, targets = gae(rewards, values, mask, gamma, 1.0, bootstrap)
    np.testing.assert_allclose(advantages, np.where(mask, returns - values, 0), atol=1e-9)
    np.testing.assert_allclose(targets, returns, atol=1e-9)
    residuals = gae(rewards, values, mask, gamma, 0.0, bootstrap)[0]
    for row, length in enumerate(mask.sum(-1)):
        for t in range(length):
            last = 0 if bootstrap is None else bootstrap[row]
            after = values[row, t + 1] if t + 1 < length else last
            expected = rewards[row, t] + gamma * after - values[row, t]
            assert residuals[row, t] == pytest.approx(expected, abs=1e-9)
    np.testing.assert_array_equal(residuals, td_residuals(rewards, values, mask, gamma, bootstrap))


@given(episodes(), unit)
def test_tokens_outside_the_mask_are_as_if_they_were_not_there(episode, lam):
    """A tool's answer in the middle, or a prompt in front, has no time of its own."""
    rewards, values, _, gamma, _ = episode
    gap = np.zeros_like(rewards[:, :1])
    full = np.ones_like(rewards, dtype=bool)
    packed, _ = gae(rewards, values, full, gamma, lam)

    def spread(x, filler):
        return np.concatenate([filler, x[:, :1], filler, x[:, 1:]], axis=1)

    mask = spread(full, gap.astype(bool))
    spaced, _ = gae(spread(rewards, gap + 9), spread(values, gap + 9), mask, gamma, lam)
    np.testing.assert_allclose(spaced[mask].reshape(packed.shape), packed)


groups = st.tuples(st.integers(1, 4), st.integers(2, 6)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=floats)
)


@given(groups)
def test_leave_one_out_is_the_scaled_distance_from_the_mean(rewards):
    size = rewards.shape[1]
    expected = size / (size - 1) * (rewards - rewards.mean(-1, keepdims=True))
    np.testing.assert_allclose(leave_one_out(rewards), expected, atol=1e-12)


@given(groups, st.floats(0.1, 10), floats)
def test_group_relative_ignores_offset_and_with_deviation_scale(rewards, factor, offset):
    plain = group_relative(rewards, scale="none")
    np.testing.assert_allclose(plain.sum(-1), 0, atol=1e-9)
    np.testing.assert_allclose(group_relative(rewards + offset, scale="none"), plain, atol=1e-9)
    spread = rewards.std(-1) > 1e-3
    scaled = group_relative(factor * rewards + offset, epsilon=0)
    np.testing.assert_allclose(
        scaled[spread], group_relative(rewards, epsilon=0)[spread], rtol=1e-6
    )


@pytest.mark.parametrize("ddof", [0, 1])
def test_deviation_of_the_batch(ddof):
    rewards = np.array([[0.0, 2.0], [10.0, 14.0]])
    expected = np.array([[-1.0, 1.0], [-2.0, 2.0]]) / np.std(rewards, ddof=ddof)
    found = group_relative(rewards, scale="batch", ddof=ddof, epsilon=0)
    np.testing.assert_allclose(found, expected)


def test_mean_relative_weighs_successes_by_their_rarity():
    """MaxRL: with k of G successes a success gets G/k - 1 and a failure -1; without any, 0."""
    rewards = np.array([[1.0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    expected = [[3, -1, -1, -1], [1, 1, -1, -1], [0, 0, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(group_relative(rewards, scale="mean"), expected)


@given(groups, st.data())
def test_invalid_completions_are_in_nobodys_baseline(rewards, data):
    valid = data.draw(arrays(bool, rewards.shape)) | (np.arange(rewards.shape[1]) < 2)
    for function in (leave_one_out, group_relative):
        found = function(np.where(valid, rewards, math.nan), valid)
        for row in range(len(rewards)):
            alone = function(rewards[row : row + 1, valid[row]])
            np.testing.assert_allclose(found[row, valid[row]], alone[0])
        assert (found[~valid] == 0).all()


# --- estimators of the KL ------------------------------------------------------------------------


@given(
    arrays(np.float64, 4, elements=floats),
    arrays(np.float64, 4, elements=floats),
)
def test_k1_and_k3_are_unbiased_and_k3_is_never_negative(logits, reference):
    logs, ref = (x - np.log(np.exp(x).sum()) for x in (logits, reference))
    exact = (np.exp(logs) * (logs - ref)).sum()
    assert categorical_kl(logits, reference) == pytest.approx(exact, abs=1e-9)
    for estimator in ("k1", "k3"):
        mean = (np.exp(logs) * kl_estimate(logs, ref, estimator)).sum()
        assert mean == pytest.approx(exact, abs=1e-9)
    assert (kl_estimate(logs, ref, "k3") >= 0).all()
    assert entropy(logits) == pytest.approx(-(np.exp(logs) * logs).sum())


def test_k3_as_a_loss_descends_the_forward_kl():
    """Its expected gradient on-policy is that of KL(ref || policy): π - π_ref on the logits."""
    logits = torch.tensor([1.2, 0.1, -0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.3, 0.4, -0.2], dtype=torch.float64).log_softmax(0)
    logs = logits.log_softmax(0)
    loss = (logs.detach().exp() * kl_estimate(logs, reference, "k3")).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, logits.detach().softmax(0) - reference.exp())


def test_linear_weight_goes_straight():
    assert [linear_kl_weight(0.2, 0.0, p) for p in (0, 0.5, 1)] == [0.2, 0.1, 0.0]


# --- surrogates ----------------------------------------------------------------------------------


def slope(rule, value, advantage):
    ratio = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(rule(ratio, advantage), ratio)
    return gradient.item()


def test_dual_clip_stops_a_runaway_with_negative_advantage():
    advantage = torch.tensor(-1.0, dtype=torch.float64)
    rule = DualClip(0.2, dual_clip=3.0)
    assert rule(4.0, -1.0) == -3
    assert slope(rule, 4.0, advantage) == 0
    assert slope(rule, 2.0, advantage) == -1
    # Positive advantages are PPO's.
    assert rule(4.0, 1.0) == Clip(0.2)(4.0, 1.0)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_soft_gate_has_the_plain_slope_at_one_and_fades_away_from_it(advantage):
    a = torch.tensor(advantage, dtype=torch.float64)
    assert slope(SoftGate(1.0, 1.05), 1.0, a) == pytest.approx(advantage)
    tau = 1.0 if advantage > 0 else 1.05
    for value in (0.2, 3.0):
        sigma = 1 / (1 + math.exp(-tau * (value - 1)))
        expected = 4 * sigma * (1 - sigma) * advantage
        assert slope(SoftGate(1.0, 1.05), value, a) == pytest.approx(expected)
        assert abs(expected) < abs(advantage)


def test_clipped_weight_keeps_a_gradient_for_every_token():
    logs = torch.tensor([math.log(0.2), math.log(0.9)], requires_grad=True)
    ratio = probability_ratio(logs, torch.tensor([math.log(0.1), math.log(0.1)]))
    objective = CappedWeight(5.0)(ratio, torch.tensor([2.0, 2.0]), logs)
    objective.sum().backward()
    # Weights 2 and 9; the second is cut to 5, and no gradient flows through either.
    torch.testing.assert_close(logs.grad, torch.tensor([4.0, 10.0]))


def test_gamma_weight_is_one_at_one_and_a_constant():
    logs = torch.tensor([-1.0], requires_grad=True)
    for w, expected in ((1.0, 1.0), (2.0, 2**2 * math.exp(-3))):
        objective = GammaWeight((2, 3), (3, 2))(torch.tensor([w]), torch.tensor([1.0]), logs)
        (gradient,) = torch.autograd.grad(objective.sum(), logs)
        assert gradient.item() == pytest.approx(expected)


@given(batches())
def test_product_ratio_is_that_of_the_whole_completion(batch):
    new, old, _, _, mask = batch
    product = sequence_ratio(new, old, mask, normalize=False)
    tokens = torch.where(mask, (new - old).exp(), 1.0).prod(-1, keepdim=True)
    torch.testing.assert_close(product, tokens)
    mean = sequence_ratio(new, old, mask)
    torch.testing.assert_close(mean, tokens ** (1 / mask.sum(-1, keepdim=True)))


def test_importance_weight_is_truncated_and_constant():
    old = torch.tensor([0.0, -1.0], requires_grad=True)
    weight = importance_weight(old, torch.tensor([-2.0, -0.5]), 3.0)
    torch.testing.assert_close(weight, torch.tensor([3.0, math.exp(-0.5)]))
    assert not weight.requires_grad


def test_value_clipping_takes_the_larger_error():
    values, old, returns = np.array([1.0, 0.05]), np.zeros(2), np.array([2.0, 2.0])
    # 1.0 is held at 0.2, an error of 1.8 rather than 1.0; 0.05 is within and stays.
    expected = [1.8**2 / 2, 1.95**2 / 2]
    np.testing.assert_allclose(value_loss(values, returns, old, 0.2), expected)


@given(batches(), st.floats(0.05, 0.5))
def test_infinite_clip_range_is_the_unclipped_surrogate(batch, clip_range):
    new, old, _, advantages, mask = batch
    ratio = probability_ratio(new, old, mask)
    open_ended = Clip(clip_range, math.inf)(ratio, advantages)
    assert (Clip(math.inf)(ratio, advantages) == ratio * advantages).all()
    assert (open_ended >= Clip(clip_range)(ratio, advantages)).all()


# --- the table -----------------------------------------------------------------------------------


@given(batches())
def test_at_the_first_update_ppo_grpo_and_reinforce_agree_where_theory_says_so(batch):
    """Every ratio is 1: with the same advantages and mean, clip rules have the same gradient."""
    new, _, _, advantages, mask = batch
    base = replace(ALGORITHMS["reinforce"], aggregation="token")
    _, expected = loss_and_gradient(base, new, new, advantages, mask)
    for key in ALGORITHMS:  # GSPO too: 1/n in its ratio, n tokens that share it
        row = replace(ALGORITHMS[key], aggregation="token")
        _, gradient = loss_and_gradient(row, new, new, advantages, mask)
        torch.testing.assert_close(gradient, expected, msg=key)
    # GSPO's ratio is shared by a completion: equal to GRPO's gradient under its own mean.
    _, grpo = loss_and_gradient(ALGORITHMS["grpo"], new, new, advantages, mask)
    _, gspo = loss_and_gradient(ALGORITHMS["gspo"], new, new, advantages, mask)
    torch.testing.assert_close(gspo, grpo)


@given(batches(low=-0.5, high=0.5))
def test_ppo_gradient_is_zero_exactly_on_the_tokens_that_clip_fraction_counts(batch):
    new, old, _, advantages, mask = batch
    wide = torch.where(advantages == 0, 1.0, advantages).expand(new.shape)
    _, gradient = loss_and_gradient(ALGORITHMS["ppo"], new, old, wide, mask)
    share = clip_fraction(Clip(0.2), probability_ratio(new, old, mask), wide, mask)
    assert share.item() == pytest.approx(((gradient == 0) & mask).sum().item() / mask.sum().item())


def test_the_issue_of_length():
    """How each mean weighs the tokens of completions of 1 and 3 tokens."""
    mask = np.array([[1, 0, 0], [1, 1, 1]])
    weights = {
        "token": [1 / 4, 1 / 4],
        "sequence": [1 / 2, 1 / 6],
        "fixed": [1 / 10, 1 / 10],
        "sum": [1 / 2, 1 / 2],
    }
    for how, expected in weights.items():
        for row in (0, 1):
            values = np.zeros((2, 3))
            values[row, 0] = 1.0
            length = 5 if how == "fixed" else None
            assert aggregate(values, mask, how, length=length) == pytest.approx(expected[row])


def test_rows_are_the_fields_and_cite_papers_that_are_in_the_bibliography():
    bibliography = (ROOT / "book/references.bib").read_text(encoding="utf-8")
    assert {"reinforce", "rloo", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo"} < set(
        ALGORITHMS
    )
    for row in ALGORITHMS.values():
        assert f"{{{row.paper}," in bibliography
    differ = {
        f.name
        for f in fields(Algorithm)
        if getattr(ALGORITHMS["grpo"], f.name) != getattr(ALGORITHMS["dr_grpo"], f.name)
    }
    assert differ == {"name", "paper", "advantage", "aggregation", "kl", "kl_estimator"}


def test_numpy_and_torch_agree():
    generator = np.random.default_rng(0)
    new, old, ref = generator.normal(size=(3, 4, 6)) - 2
    mask = np.arange(6) < np.array([6, 2, 4, 1])[:, None]
    advantages = generator.normal(size=(4, 1))
    for row in ALGORITHMS.values():
        options = {"kl_weight": 0.1} if row.kl == "loss" else {}
        options |= {"length": 6} if row.aggregation == "fixed" else {}
        one = policy_loss(row, new, old, advantages, mask, ref_log_probs=ref, **options)
        tensors = (torch.from_numpy(x) for x in (new, old, advantages, mask))
        other = policy_loss(row, *tensors, ref_log_probs=torch.from_numpy(ref), **options)
        assert one == pytest.approx(other.item()), row.name


def test_completion_advantages_of_each_row():
    rewards = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    mean = rewards.mean(-1, keepdims=True)
    deviation = rewards.std(-1, ddof=1, keepdims=True) + 1e-4
    expected = {
        "reinforce": rewards - rewards.mean(),
        "rloo": 1.5 * (rewards - mean),
        "grpo": (rewards - mean) / deviation,
        "dr_grpo": rewards - mean,
        "maxrl": (rewards - mean) / mean,
    }
    for key, advantages in expected.items():
        np.testing.assert_allclose(completion_advantages(ALGORITHMS[key], rewards), advantages)
    with pytest.raises(ValueError, match="advantage must be one that needs no value head"):
        completion_advantages(ALGORITHMS["ppo"], rewards)


# --- bad input ------------------------------------------------------------------------------------

BAD_ROWS = [
    ({"advantage": "magic"}, "advantage of algorithm 'GRPO' must be one of"),
    ({"clip": "ppo"}, r"clip of algorithm 'GRPO' must be a clip rule, such as Clip\(0.2\), got"),
    ({"ratio": "none"}, r"ratio .* must be one of \(.*\) for Clip to act on, got 'none'"),
    ({"kl": "none"}, "kl_estimator .* must be left out unless kl='loss', got 'k3'"),
    ({"kl_estimator": None}, "kl_estimator .* must be one of .* for kl='loss', got None"),
    ({"kl_estimator": "exact", "kl_weighted": True}, "kl_weighted .* must be left out"),
    ({"kl_estimator": "k1"}, "as a loss, k1 has no gradient in expectation"),
    (
        {"kl": "reward", "kl_estimator": None, "kl_weighted": True},
        "kl_weighted .* must be left out unless kl='loss'",
    ),
    (
        {"clip": GammaWeight((2.0, 3.0), (3.0, 2.0))},
        r"ratio .* must be one of \('product',\) for GammaWeight to act on, got 'token'",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ROWS)
def test_rows_that_contradict_themselves_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(ALGORITHMS["grpo"], **changes)


def test_a_new_algorithm_is_one_expression():
    clip = DualClip(0.2, dual_clip=3.0)
    mine = replace(ALGORITHMS["grpo"], name="mine", clip=clip, kl_weighted=True)
    logs = torch.full((2, 3), -1.0)
    loss = policy_loss(mine, logs, logs, torch.ones(2, 1), torch.ones(2, 3), ref_log_probs=logs)
    assert loss == -1


LOGS, MASK, ADVANTAGE = np.full((2, 3), -1.0), np.ones((2, 3)), np.ones((2, 1))


@given(arrays(float, st.integers(1, 4), elements=st.floats(0.05, 1)), st.integers(1, 4))
def test_best_of_n_against_every_draw_of_n(weights, n):
    """Completions in the order of their scores; every way to draw n of them is listed."""
    policy = weights / weights.sum()
    best = np.zeros(len(policy))
    for drawn in product(range(len(policy)), repeat=n):
        best[max(drawn)] += np.prod(policy[list(drawn)])
    below = np.minimum(np.cumsum(policy) - policy, 1 - policy)
    for kind in (np.asarray, torch.as_tensor):
        logs = np.asarray(best_of_n_log_ratio(kind(below), kind(policy), n))
        np.testing.assert_allclose(logs, np.log(best / policy), atol=1e-9)
    assert (best * logs).sum() <= best_of_n_kl_bound(float(n)) + 1e-9


def test_best_of_n_of_very_many_completions():
    """The limit of a continuous reward: the density is n F^(n - 1)."""
    below = np.array([0.0, 0.3, 0.9, 1 - 1e-13])
    found = best_of_n_log_ratio(below, np.full(4, 1e-14), 64)
    np.testing.assert_allclose(found[1:], np.log(64) + 63 * np.log(below[1:]), rtol=1e-9)
    assert found[0] == pytest.approx(63 * np.log(1e-14))


BAD_CALLS = [
    (lambda: policy_loss(ALGORITHMS["ppo"], LOGS, LOGS, ADVANTAGE, 0 * MASK), "mask must be true"),
    (
        lambda: policy_loss(ALGORITHMS["ppo"], LOGS, LOGS[:1], ADVANTAGE, MASK),
        r"old_log_probs must be of shape \(2, 3\), got \(1, 3\)",
    ),
    (
        lambda: policy_loss(ALGORITHMS["ppo"], LOGS, LOGS, np.ones(2), MASK),
        r"advantages must be of shape \(2, 3\) or \(2, 1\), got \(2,\)",
    ),
    (
        lambda: policy_loss(ALGORITHMS["ppo"], LOGS, LOGS, ADVANTAGE, MASK, kl_weight=0.1),
        r"kl_weight must be 0 for PPO, whose KL term is not in the loss \(kl='reward'\), got 0.1",
    ),
    (
        lambda: policy_loss(ALGORITHMS["grpo"], LOGS, LOGS, ADVANTAGE, MASK, kl_weight=-1.0),
        "kl_weight must be at least 0, got -1.0",
    ),
    (
        lambda: policy_loss(ALGORITHMS["grpo"], LOGS, LOGS, ADVANTAGE, MASK, kl_weight=0.1),
        "ref_log_probs must be given",
    ),
    (
        lambda: policy_loss(ALGORITHMS["dr_grpo"], LOGS, LOGS, ADVANTAGE, MASK),
        "length must be given for 'fixed' alone, got None",
    ),
    (lambda: aggregate(LOGS, MASK, "token", length=3), "length must be given for 'fixed' alone"),
    (lambda: aggregate(LOGS, MASK, "fixed", length=0), "length must be above 0, got 0"),
    (lambda: aggregate(LOGS, MASK, "median"), "how must be one of"),
    (
        lambda: aggregate(LOGS, np.array([[1, 1, 1], [0, 0, 0]]), "sequence"),
        "mask must be true for at least one token of each completion",
    ),
    (lambda: leave_one_out(np.ones((3, 1))), r"rewards must be two valid completions or more"),
    (
        lambda: group_relative(np.ones((3, 1))),
        r"rewards must be more than ddof=1 valid completions",
    ),
    (lambda: group_relative(np.ones(3)), r"rewards must be of shape \(prompts, completions\)"),
    (
        lambda: group_relative(-np.ones((1, 2)), scale="mean"),
        "rewards must be at least 0 for 'mean'",
    ),
    (lambda: group_relative(np.ones((1, 2)), scale="median"), "scale must be one of"),
    (lambda: gae(LOGS, LOGS, MASK, lam=1.5), "lam must be from 0 to 1, got 1.5"),
    (lambda: gae(LOGS, LOGS, MASK, gamma=-0.1), "gamma must be from 0 to 1, got -0.1"),
    (lambda: gae(LOGS, LOGS[:, :2], MASK), r"values must be of shape \(2, 3\), got \(2, 2\)"),
    (
        lambda: gae(LOGS, LOGS, MASK, bootstrap_value=np.ones(3)),
        r"bootstrap_value must be of shape \(2,\), got \(3,\)",
    ),
    (lambda: kl_estimate(LOGS, LOGS, "k4"), "estimator must be one of k1, k2, k3, got 'k4'"),
    (lambda: DualClip(0.2, dual_clip=1.1), "dual_clip must be above 1 \\+ ε, got 1.1"),
    (lambda: DualClip(0.2, 3.0, dual_clip=3.5), "dual_clip must be above 1 \\+ ε, got 3.5"),
    (lambda: DualClip(0.0, dual_clip=3.0), "clip_range must be above 0, got 0.0"),
    (lambda: DualClip(0.2, dual_clip=0.5), "dual_clip must be above 1 \\+ ε, got 0.5"),
    (lambda: CappedWeight(-3), "cap must be above 1, got -3"),
    (lambda: SoftGate(1.0, -1), "temperature_negative must be above 0, got -1"),
    (
        lambda: GammaWeight((1, 1), (-1, 2)),
        r"shape_negative must be two finite numbers above 0, got \(-1, 2\)",
    ),
    (lambda: CappedWeight(0.5), "cap must be above 1, got 0.5"),
    (lambda: SoftGate(0.0, 1.0), "temperature_positive must be above 0"),
    (
        lambda: GammaWeight((0, 1), (1, 1)),
        r"shape_positive must be two finite numbers above 0, got \(0, 1\)",
    ),
    (lambda: importance_weight(LOGS, LOGS, 0.5), "cap must be at least 1, got 0.5"),
    (lambda: value_loss(LOGS, LOGS, LOGS), "clip_range must be given together with old_values"),
    (lambda: Clip(0.2, 0.0), "clip_range_high must be above 0, got 0.0"),
    (lambda: linear_kl_weight(0.1, -0.1, 0.5), "last must be at least 0, got -0.1"),
    (lambda: linear_kl_weight(0.1, 0.1, 2), "progress must be from 0 to 1, got 2"),
    (lambda: best_of_n_kl_bound(0), "n must be at least 1, got 0"),
    (lambda: best_of_n_log_ratio(0.5, 0.1, 0), "n must be at least 1, got 0"),
    (lambda: best_of_n_log_ratio(-0.5, 0.1, 2), "below must be from 0 to 1, got "),
    (lambda: best_of_n_log_ratio(0.5, 0.0, 2), "probability must be above 0, got "),
    (lambda: best_of_n_log_ratio(0.9, 0.2, 2), "below .* probability must be at most 1, got "),
    (lambda: adaptive_kl_weight(-1, 1, target=1, horizon=1, samples=1), "kl_weight must be at"),
]


@pytest.mark.parametrize("number", range(len(BAD_CALLS)))
def test_bad_calls_name_argument_value_and_what_is_allowed(number):
    call, message = BAD_CALLS[number]
    with pytest.raises(ValueError, match=message):
        call()


INTEGERS = np.ones((2, 3), dtype=int)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: gae(INTEGERS, LOGS, MASK), "rewards"),
        (lambda: group_relative(INTEGERS), "rewards"),
        (lambda: probability_ratio(INTEGERS, LOGS), "log_probs"),
        (lambda: Clip(0.2)(INTEGERS, LOGS), "ratio"),
        (lambda: aggregate(INTEGERS, MASK, "token"), "values"),
        (lambda: categorical_kl(INTEGERS, LOGS), "logits"),
        (lambda: kl_estimate(INTEGERS, LOGS, "k1"), "log_probs"),
        (lambda: policy_loss(ALGORITHMS["ppo"], LOGS, LOGS, INTEGERS, MASK), "advantages"),
        (lambda: value_loss(LOGS, INTEGERS), "returns"),
    ],
)
def test_integers_are_refused(call, name):
    with pytest.raises(TypeError, match=f"^{name} must be of a floating-point type, got int64"):
        call()


def test_clip_fraction_is_of_the_ratio_that_the_loss_used():
    """Log-ratios of ±0.01 in turn: the sequence ratio is 1, so GSPO has clipped nothing."""
    old = torch.zeros(2, 4)
    new = torch.tensor([0.01, -0.01, 0.01, -0.01]).expand(2, 4)
    mask, advantages = torch.ones(2, 4), torch.tensor([[1.0], [-1.0]])
    for key in ("gspo", "luspo"):
        row = ALGORITHMS[key]
        batch = Batch(mask=mask, old_log_probs=old, advantages=advantages)
        ratio = losses(row, batch, new).ratio
        assert clip_fraction(row.clip, ratio, advantages, mask) == 0
        token = probability_ratio(new, old)
        assert clip_fraction(row.clip, token, advantages, mask) == 0.5


def test_clip_fraction_counts_what_the_dual_clip_removes():
    rule, advantage, mask = DualClip(0.2, dual_clip=3.0), np.array([[-1.0]]), np.ones((1, 3))
    ratio = np.array([[0.7, 2.0, 3.5]])  # below its range, pushed, beyond its cap
    assert clip_fraction(rule, ratio, advantage, mask) == pytest.approx(2 / 3)
    whole = np.array([[3.5], [2.0]])  # one a completion: its tokens share it
    mask = np.array([[1, 1, 1], [1, 0, 0]])
    assert clip_fraction(rule, whole, -np.ones((2, 1)), mask) == pytest.approx(3 / 4)


def test_diagnostics_by_hand():
    mask = np.array([1, 1, 1, 0])
    ratio, advantage = np.array([1.3, 1.3, 0.7, 5.0]), np.array([1.0, -1.0, -1.0, 1.0])
    assert clip_fraction(Clip(0.2), ratio, advantage, mask) == pytest.approx(2 / 3)
    old, new = np.zeros(4), np.array([0.1, -0.2, 0.0, 9.0])
    expected = sum(math.exp(d) - 1 - d for d in (0.1, -0.2, 0.0)) / 3
    assert approx_kl(new, old, mask) == pytest.approx(expected)
    returns = np.array([1.0, 2.0, 3.0, 50.0])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(np.full(4, 2.0), returns, mask) == 0
    assert math.isnan(explained_variance(returns, np.ones(4), mask))
