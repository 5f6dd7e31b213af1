"""The formulas against hand-made cases, closed forms and their own mathematics."""

import math

import numpy as np
import pytest
import torch
from conftest import CASES
from hypothesis import given
from hypothesis import strategies as st

from ppo_demo.advantages import whiten
from ppo_demo.aggregation import masked_mean
from ppo_demo.divergences import adaptive_kl_weight, categorical_kl
from ppo_demo.surrogates import Clip, probability_ratio, value_loss

MAKERS = {
    f"{library}-{dtype}": (library, dtype)
    for library in ("numpy", "torch")
    for dtype in ("float32", "float64")
}


@pytest.fixture(params=MAKERS, ids=str)
def array(request):
    """A function that makes an array of one library and precision."""
    library, dtype = MAKERS[request.param]
    if library == "numpy":
        return lambda values: np.asarray(values, dtype=dtype)
    return lambda values: torch.tensor(values, dtype=getattr(torch, dtype))


def close(actual, expected, atol=1e-6):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-5, atol=atol)


@pytest.mark.parametrize("name", ["clip-regions-positive", "clip-regions-negative"])
def test_clip_regions(name, array):
    case = CASES[name]
    given_, expected = case["input"], case["expected"]
    objective = Clip(given_["clip"])(array(given_["ratio"]), given_["advantage"])
    close(objective, expected["objective"])
    ratio = torch.tensor(given_["ratio"], dtype=torch.float64, requires_grad=True)
    Clip(given_["clip"])(ratio, given_["advantage"]).sum().backward()
    slopes = [given_["advantage"] if flows else 0.0 for flows in expected["has_gradient"]]
    assert ratio.grad.tolist() == slopes


def test_lab_b_case():
    case = CASES["lab-b"]
    given_, expected = case["input"], case["expected"]
    ratio, advantage, clip = given_["ratio"], given_["advantage"], given_["clip"]
    assert Clip(np.inf)(ratio, advantage) == pytest.approx(expected["unclipped"])
    assert Clip(clip)(ratio, advantage) == pytest.approx(expected["objective"])


def test_negative_advantage_takes_the_minimum():
    assert Clip(0.2)(1.3, -0.8) == pytest.approx(-1.04)


@given(
    st.floats(0, 5),
    st.floats(-3, 3),
    st.floats(0.01, 2),
)
def test_surrogate_is_a_lower_bound_and_touches_at_one(ratio, advantage, clip_range):
    objective = Clip(clip_range)(ratio, advantage)
    assert objective <= ratio * advantage
    assert Clip(clip_range)(1.0, advantage) == advantage
    assert Clip(math.inf)(ratio, advantage) == ratio * advantage


@given(st.floats(0, 5), st.floats(-3, 3).filter(lambda a: abs(a) > 1e-3), st.floats(0.05, 0.9))
def test_gradient_is_zero_exactly_where_the_clip_bites(value, advantage, clip_range):
    ratio = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    Clip(clip_range)(ratio, advantage).backward()
    bites = value > 1 + clip_range if advantage > 0 else value < 1 - clip_range
    assert ratio.grad.item() == (0 if bites else advantage)


@pytest.mark.parametrize("clip_range", [0.0, -0.1, math.nan, np.array([0.2, 0.0])])
def test_clip_range_must_be_above_zero(clip_range):
    with pytest.raises(ValueError, match=r"clip_range must be above 0, got"):
        Clip(clip_range)(np.ones(2), 0.5)


def test_ratio_of_numbers_and_of_arrays(array):
    close(probability_ratio(array([-1.0, -2.0]), array([-1.0, -2.5])), [1.0, math.exp(0.5)])


def test_garbage_on_padding_reaches_neither_value_nor_gradient():
    case = CASES["padding-garbage"]
    given_, expected = case["input"], case["expected"]
    logprobs = torch.tensor(given_["logprobs"], dtype=torch.float64, requires_grad=True)
    old = torch.tensor(given_["old_logprobs"], dtype=torch.float64)
    mask = torch.tensor(given_["mask"])
    ratio = probability_ratio(logprobs, old, mask)
    objective = Clip(given_["clip"])(ratio, torch.tensor(given_["advantages"]))
    mean = masked_mean(objective, mask)
    mean.backward()
    assert mean.item() == pytest.approx(expected["mean_objective"])
    assert torch.isfinite(logprobs.grad).all() == expected["gradient_is_finite"]
    assert logprobs.grad.tolist() == [0.5, -0.5, 0.0]


def test_kl_is_exact(array):
    case = CASES["kl-expectations"]
    policy, reference = (np.log(case["input"][k]) for k in ("policy", "reference"))
    close(categorical_kl(array(policy), array(reference)), case["expected"]["exact"])


def test_kl_gradient_is_that_of_the_reverse_kl():
    case = CASES["kl-gradients"]
    logits = torch.tensor(case["input"]["policy_logits"], dtype=torch.float64, requires_grad=True)
    kl = categorical_kl(logits, torch.tensor(case["input"]["reference_logits"]).double())
    kl.backward()
    close(kl.item(), case["expected"]["kl"])
    close(logits.grad, case["expected"]["gradient_of_reverse_kl"])


logits_of_four = st.lists(st.floats(-50, 50), min_size=4, max_size=4).map(np.array)


@given(logits_of_four, logits_of_four, st.floats(-100, 100))
def test_kl_is_at_least_zero_and_ignores_a_constant(logits, reference, constant):
    kl = categorical_kl(logits, reference)
    assert kl >= -1e-9
    assert categorical_kl(logits, logits) == 0
    np.testing.assert_allclose(categorical_kl(logits + constant, reference), kl, atol=1e-9)


def test_adaptive_kl_weight():
    case = CASES["adaptive-kl"]["input"]
    weight = adaptive_kl_weight(
        case["beta"],
        case["kl"],
        target=case["target"],
        horizon=case["horizon"],
        samples=case["n_samples"],
    )
    assert weight == pytest.approx(CASES["adaptive-kl"]["expected"]["beta"])
    # On target nothing moves; below it the weight falls, by a fifth a horizon at most.
    assert adaptive_kl_weight(0.2, 6, target=6, horizon=100, samples=10) == 0.2
    assert adaptive_kl_weight(0.2, 0, target=6, horizon=100, samples=100) == pytest.approx(0.16)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("kl", -1), ("kl_weight", -0.1), ("target", 0), ("horizon", 0), ("samples", 0)],
)
def test_adaptive_kl_weight_refuses(argument, value):
    arguments = {"kl_weight": 0.2, "kl": 1, "target": 6, "horizon": 100, "samples": 10}
    with pytest.raises(ValueError, match=rf"^{argument} must be .*, got {value}"):
        adaptive_kl_weight(**{**arguments, argument: value})


@pytest.mark.parametrize("ddof", [0, 1])
def test_whitening_leaves_padding_out(ddof, array):
    case = CASES["whiten-mask"]
    values, mask = array(case["input"]["values"]), array(case["input"]["mask"])
    close(whiten(values, mask, ddof=ddof, epsilon=0.0), case["expected"][f"ddof{ddof}"])


def test_whitening_of_equal_values_is_zero(array):
    assert np.asarray(whiten(array([2.0, 2.0]), array([1, 1]))).tolist() == [0, 0]


def test_value_loss_is_half_the_square(array):
    close(value_loss(array([1.0, 3.0]), array([1.0, 1.0])), [0.0, 2.0])


def test_masked_mean_ignores_anything_on_padding(array):
    mean = masked_mean(array([1.0, 2.0, math.nan, math.inf]), array([1, 1, 0, 0]))
    assert float(mean) == 1.5


@pytest.mark.parametrize(
    ("mask", "message"),
    [([0, 0], "mask must be true for at least one token"), ([1], r"mask must be of shape \(2,\)")],
)
def test_masked_mean_refuses(mask, message):
    with pytest.raises(ValueError, match=message):
        masked_mean(np.ones(2), np.array(mask))
