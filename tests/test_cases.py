"""Every case of cases/formulas.json: small inputs from public bug reports, with right values."""

import math

import numpy as np
import pytest
import torch
from conftest import CASES
from test_formulas import MAKERS

from ppo_demo._arrays import log_softmax
from ppo_demo.advantages import discounted_returns, gae, group_relative, leave_one_out, whiten
from ppo_demo.aggregation import aggregate, masked_mean
from ppo_demo.algorithms import ALGORITHMS
from ppo_demo.divergences import adaptive_kl_weight, best_of_n_kl_bound, categorical_kl, kl_estimate
from ppo_demo.lm.step import next_token_log_probs
from ppo_demo.losses import policy_loss
from ppo_demo.surrogates import Clip, probability_ratio, sequence_ratio

RUN = {}


def case(*names):
    def register(function):
        RUN.update(dict.fromkeys(names, function))
        return function

    return register


@case("returns-padding-leak", "returns-padding-leak-2")
def _(x, arr):
    yield "returns", discounted_returns(arr(x["rewards"]), arr(x["mask"]), x["gamma"])


@case("advantage-uses-returns", "gae-terminal", "gae-truncated", "gae-padding")
def _(x, arr):
    bootstrap = arr(x["bootstrap_value"]) if "bootstrap_value" in x else None
    advantages, returns = gae(
        arr(x["rewards"]), arr(x["values"]), arr(x["mask"]), x["gamma"], x["lambda"], bootstrap
    )
    yield "advantages", advantages
    yield "returns", returns


@case("returns-from-fresh-advantages")
def _(x, arr):
    # GAE's returns are its own advantages plus the values: find rewards with these advantages.
    values, wanted = x["values"], x["advantages"]
    rewards = [wanted[0] - values[1] + values[0], wanted[1] + values[1]]
    advantages, returns = gae(arr(rewards), arr(values), arr([1, 1]), 1.0, 0.0)
    np.testing.assert_allclose(np.asarray(advantages), wanted, rtol=1e-6)
    yield "returns", returns


@case("group-low-variance", "group-std-is-used", "group-one-outlier")
def _(x, arr):
    rewards = arr(x["rewards"])
    if x.get("dtype", "") not in str(rewards.dtype):
        return  # the case speaks of one precision
    yield "advantages", group_relative(rewards, ddof=x["ddof"], epsilon=x["epsilon"])


@case("group-zero-variance")
def _(x, arr):
    for scale in ("group", "none", "batch", "mean"):
        yield "advantages", group_relative(arr(x["rewards"]), scale=scale)


@case("group-rejected-row")
def _(x, arr):
    rewards, valid = arr(x["rewards"]), arr(x["valid"])
    yield "leave_one_out", leave_one_out(rewards, valid)
    yield "mean_baseline", group_relative(rewards, valid, scale="none")


@case("leave-one-out")
def _(x, arr):
    yield "leave_one_out", leave_one_out(arr(x["rewards"]))


@case("kl-direction")
def _(x, arr):
    ratio = arr(x["log_ratio"])
    for estimator in ("k1", "k2", "k3"):
        yield estimator, kl_estimate(ratio, 0 * ratio, estimator)


@case("kl-expectations")
def _(x, arr):
    policy, reference = (arr(np.log(x[key])) for key in ("policy", "reference"))
    yield "exact", categorical_kl(policy, reference)
    for estimator in ("k1", "k2", "k3"):
        estimate = np.asarray(kl_estimate(policy, reference, estimator))
        yield f"E[{estimator}]", (np.asarray(x["policy"]) * estimate).sum()


@case("kl-mask")
def _(x, arr):
    ratio, mask = arr(x["log_ratio"]), arr(x["mask"])
    yield "mean_k3", masked_mean(kl_estimate(ratio, 0 * ratio, "k3", mask), mask)


@case("adaptive-kl")
def _(x, _arr):
    keys = {"target": x["target"], "horizon": x["horizon"], "samples": x["n_samples"]}
    yield "beta", adaptive_kl_weight(x["beta"], x["kl"], **keys)


@case("clip-regions-positive", "clip-regions-negative")
def _(x, arr):
    ratio = arr(x["ratio"])
    yield "objective", Clip(x["clip"])(ratio, x["advantage"])
    if isinstance(ratio, torch.Tensor):
        ratio.requires_grad_()
        Clip(x["clip"])(ratio, x["advantage"]).sum().backward()
        yield "has_gradient", ratio.grad != 0


@case("clip-higher")
def _(x, arr):
    ratio, advantage = arr(x["ratio"]), arr(x["advantage"])
    yield "objective", Clip(x["clip_low"], x["clip_high"])(ratio, advantage)


@case("lab-b")
def _(x, arr):
    ratio, clip = arr(x["ratio"]), x["clip"]
    yield "unclipped", Clip(math.inf)(ratio, x["advantage"])
    yield "clipped_ratio", Clip(clip)(ratio, 1.0)
    yield "objective", Clip(clip)(ratio, x["advantage"])


@case("padding-garbage")
def _(x, arr):
    logs, old, mask = (arr(x[key]) for key in ("logprobs", "old_logprobs", "mask"))
    if isinstance(logs, torch.Tensor):
        logs.requires_grad_()
    ratio = probability_ratio(logs, old, mask)
    mean = masked_mean(Clip(x["clip"])(ratio, arr(x["advantages"])), mask)
    yield "mean_objective", mean
    if isinstance(logs, torch.Tensor):
        mean.backward()
        yield "gradient_is_finite", torch.isfinite(logs.grad).all()


@case("sequence-ratio")
def _(x, arr):
    ratio = arr(x["log_ratio"])
    yield "ratio", sequence_ratio(ratio, 0 * ratio, arr(x["mask"]))[0]


@case("aggregation")
def _(x, arr):
    mask = arr(x["mask"])
    for how in ("token", "sequence", "fixed"):
        weights = []
        for row in (0, 1):  # a loss of 1 on the first token of one completion: its weight
            values = np.zeros((2, 7))
            values[row, 0] = 1
            loss = aggregate(arr(values), mask, how, length=7 if how == "fixed" else None)
            weights.append(float(loss))
        yield how, weights


@case("whiten-mask")
def _(x, arr):
    for ddof in (0, 1):
        yield f"ddof{ddof}", whiten(arr(x["values"]), arr(x["mask"]), ddof=ddof, epsilon=0.0)


@case("best-of-n-kl")
def _(x, arr):
    yield "bound", best_of_n_kl_bound(arr(x["n"]))


@case("logits-shift")
def _(x, _arr):
    logits = torch.tensor([x["logits"]], dtype=torch.float64)
    log_probs = next_token_log_probs(logits, torch.tensor([x["tokens"]]))
    yield "logprob_of_tokens_1_and_2", log_probs[0]


@case("kl-gradients")
def _(x, arr):
    logits, reference = arr(x["policy_logits"]), arr(x["reference_logits"])
    yield "kl", categorical_kl(logits, reference)
    if not isinstance(logits, torch.Tensor):
        return
    logits.requires_grad_()
    weights = logits.detach().softmax(-1)

    def gradient(value):
        return torch.autograd.grad(value, logits, materialize_grads=True)[0]

    yield "gradient_of_reverse_kl", gradient(categorical_kl(logits, reference))
    logs = log_softmax(logits)
    ratio = probability_ratio(logs, logs.detach())
    for estimator in ("k1", "k2", "k3"):
        estimate = kl_estimate(logs, log_softmax(reference), estimator)
        yield f"{estimator}_as_loss", gradient((weights * estimate).sum())
        logs, ratio = log_softmax(logits), probability_ratio(log_softmax(logits), logs.detach())
        weighted = kl_estimate(logs, log_softmax(reference), estimator, ratio=ratio)
        yield f"{estimator}_times_ratio", gradient((weights * weighted).sum())
        logs = log_softmax(logits)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", CASES)
def test_case(name, make):
    library, dtype = MAKERS[make]

    def arr(values):
        values = np.asarray(values, dtype=dtype)
        return values if library == "numpy" else torch.from_numpy(values.copy())

    expected = CASES[name]["expected"]
    seen = set()
    for key, value in RUN[name](CASES[name]["input"], arr):
        if key in expected:
            seen.add(key)
            value = value.detach() if isinstance(value, torch.Tensor) else value
            tolerance = {"rtol": 2e-5, "atol": 2e-6}
            np.testing.assert_allclose(np.asarray(value), expected[key], **tolerance, err_msg=key)
    needs_torch = {"has_gradient", "gradient_is_finite"} | {
        key for key in expected if "_as_loss" in key or "_times_" in key or "gradient_of" in key
    }
    other_precision = CASES[name]["input"].get("dtype", dtype) != dtype
    if not other_precision:
        assert seen == expected.keys() - (needs_torch if library == "numpy" else set())


def test_equal_rewards_leave_the_kl_term_alone():
    """Case group-zero-variance, second half."""
    rewards = torch.ones(1, 4)
    generator = torch.Generator().manual_seed(0)
    logs = torch.randn(4, 5, generator=generator).sub(2).requires_grad_()
    reference = torch.randn(4, 5, generator=generator) - 2
    mask = torch.ones(4, 5)
    advantages = group_relative(rewards).reshape(4, 1)
    with_kl = policy_loss(
        ALGORITHMS["grpo"],
        logs,
        logs.detach(),
        advantages,
        mask,
        ref_log_probs=reference,
        kl_weight=0.1,
    )
    kl = 0.1 * kl_estimate(logs, reference, "k3").mean()
    torch.testing.assert_close(torch.autograd.grad(with_kl, logs), torch.autograd.grad(kl, logs))
