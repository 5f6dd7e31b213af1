"""Every public formula on every kind of input: the right number, or an error that names the input.

Functions are found by walking the package, so that a new one cannot be left out. Each runs on NumPy
and PyTorch, in four precisions, value and gradient. What it should give is the same function in
float64 on the same (rounded) numbers; that those are right is the work of the other tests.
"""

import importlib
import inspect
import math
from functools import partial

import mpmath
import numpy as np
import pytest
import torch

import ppo_demo
from ppo_demo.advantages import discounted_returns, gae, group_relative, leave_one_out, whiten
from ppo_demo.aggregation import aggregate, masked_mean
from ppo_demo.algorithms import ALGORITHMS
from ppo_demo.bandit import simulate
from ppo_demo.diagnostics import approx_kl, clip_fraction, explained_variance
from ppo_demo.divergences import (
    adaptive_kl_weight,
    best_of_n_kl_bound,
    categorical_kl,
    entropy,
    k3,
    kl_estimate,
    linear_kl_weight,
)
from ppo_demo.losses import Batch, losses
from ppo_demo.losses import policy_loss as policy
from ppo_demo.surrogates import (
    CappedWeight,
    Clip,
    ClipRule,
    DualClip,
    GammaWeight,
    SoftGate,
    Unclipped,
    importance_weight,
    probability_ratio,
    sequence_ratio,
    value_loss,
)

MODULES = ("advantages", "aggregation", "diagnostics", "divergences", "losses", "surrogates")
SCALARS = {"adaptive_kl_weight", "linear_kl_weight"}  # of Python numbers alone: tested below


def public():
    """Return every public formula: functions, and rules that are called."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(f"{ppo_demo.__name__}.{name}")
        for key, value in vars(module).items():
            if key.startswith("_") or getattr(value, "__module__", "") != module.__name__:
                continue
            rule = inspect.isclass(value) and value is not ClipRule and hasattr(value, "ratios")
            if inspect.isfunction(value) or rule:
                found[key] = value
    return found


def loss_of(row, log_probs, old, advantages, values, returns, ref, mask, **options):
    """`losses` of a row with all its terms, as one number."""
    batch = Batch(
        mask=mask,
        old_log_probs=old,
        advantages=advantages,
        returns=returns,
        old_values=returns,
        ref_log_probs=ref,
        sampler_log_probs=old,
    )
    options |= {"kl_weight": 0.1} if row.kl == "loss" else {}
    return losses(row, batch, log_probs, values, value_clip=0.3, **options).loss


def fixed(row):
    return {"length": 4} if row.aggregation == "fixed" else {}


def policy_loss(function, log_probs, old, advantages, ref, mask):
    row = ALGORITHMS["grpo"]
    return function(row, log_probs, old, advantages, mask, ref_log_probs=ref, kl_weight=0.1)


TOKENS = ("logs", "logs", "mask")
LOSS = ("logs", "logs", "real", "real", "real", "logs", "mask")
# Of each: the kinds of its arrays, in order, and how they are passed. The gradient is that with
# respect to the first.
CALLS = {
    "discounted_returns": [(("real", "mask"), None)],
    "td_residuals": [(("real", "real", "mask"), None)],
    "gae": [(("real", "real", "mask"), None)],
    "whiten": [(("real", "mask"), None)],
    "leave_one_out": [(("real", "valid"), None)],
    "group_relative": [
        (("real", "valid"), partial(lambda scale, f, *x: f(*x, scale=scale), scale))
        for scale in ("none", "group", "batch")
    ]
    + [(("likely", "valid"), lambda f, *x: f(*x, scale="mean"))],
    "masked_mean": [(("real", "mask"), None)],
    "aggregate": [
        (
            ("real", "mask"),
            partial(lambda h, f, *x: f(*x, h, length=8 if h == "fixed" else None), how),
        )
        for how in ("token", "sequence", "fixed", "sum")
    ],
    "clip_fraction": [
        (("ratio", "real", "mask"), lambda f, *x: f(Clip(0.2), *x)),
        (("ratio", "each", "mask"), lambda f, *x: f(DualClip(0.2, dual_clip=3.0), *x)),
    ],
    "approx_kl": [(TOKENS, None)],
    "explained_variance": [(("real", "real", "mask"), None)],
    "categorical_kl": [(("logits", "logits", "mask"), None)],
    "entropy": [(("logits", "mask"), None)],
    "k3": [(("real",), None)],
    "kl_estimate": [
        (
            ("logs", "logs", "mask", "ratio"),
            partial(lambda k, f, a, b, m, r: f(a, b, k, m, r), kind),
        )
        for kind in ("k1", "k2", "k3")
    ],
    "best_of_n_kl_bound": [(("count",), None)],
    "best_of_n_log_ratio": [(("share", "share"), lambda f, *x: f(*x, 3))],
    "losses": [
        *(
            (
                LOSS,
                partial(
                    lambda r, _, *x: loss_of(r, *x, **fixed(r)),
                    row,
                ),
            )
            for row in ALGORITHMS.values()
        )
    ],
    "policy_loss": [(("logs", "logs", "real", "logs", "mask"), policy_loss)],
    "completion_advantages": [
        (("likely", "valid"), partial(lambda r, f, *x: f(r, *x), ALGORITHMS[key]))
        for key in ("reinforce", "rloo", "grpo", "dr_grpo", "maxrl")
    ],
    "probability_ratio": [(TOKENS, None)],
    "sequence_ratio": [
        (TOKENS, None),
        (TOKENS, lambda f, *x: f(*x, normalize=False)),
    ],
    "importance_weight": [(("logs", "logs"), lambda f, *x: f(*x, 2.0))],
    "value_loss": [
        (("real", "real", "real", "mask"), lambda f, v, r, o, m: f(v, r, o, 0.3, m)),
        (("real", "real", "mask"), lambda f, v, r, m: f(v, r, mask=m)),
    ],
    "Unclipped": [
        (("ratio", "real"), lambda f, *x: f()(*x)),
        (("logs", "real"), lambda f, logs, a: f()(None, a, logs)),
    ],
    "Clip": [(("ratio", "real"), lambda f, *x: f(0.2, 0.3)(*x))],
    "DualClip": [(("ratio", "real"), lambda f, *x: f(0.2, dual_clip=3.0)(*x))],
    "CappedWeight": [(("logs", "ratio", "real"), lambda f, p, r, a: f(5.0)(r, a, p))],
    "SoftGate": [(("ratio", "real"), lambda f, *x: f(1.0, 1.05)(*x))],
    "GammaWeight": [
        (("logs", "ratio", "real"), lambda f, p, r, a: f((2.0, 3.0), (3.0, 2.0))(r, a, p))
    ],
}
ROWS = [
    pytest.param(name, number, id=f"{name}-{number}" if len(ways) > 1 else name)
    for name, ways in CALLS.items()
    for number in range(len(ways))
]
DTYPES = {
    "numpy-float64": np.float64,
    "numpy-float32": np.float32,
    "torch-float64": torch.float64,
    "torch-float32": torch.float32,
    "torch-bfloat16": torch.bfloat16,
    "torch-float16": torch.float16,
}
# Rounding: of the result in half precision, of some sums of exponentials in float32.
TOLERANCE = {
    "float64": (1e-9, 1e-12),
    "float32": (2e-4, 2e-6),
    "bfloat16": (1e-2, 1e-5),
    "float16": (2e-3, 1e-5),
}
MASK = np.array([[1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 0, 0]], dtype=bool)


def test_every_public_formula_is_in_the_table():
    assert set(public()) == set(CALLS) | SCALARS


def draw(kind, scenario, generator):
    """Return an array of a kind, in float64."""
    shape = {"logits": (3, 4, 5), "each": (3, 1), "count": (3,), "share": (4,)}.get(kind, (3, 4))
    if scenario == "one token":
        shape = tuple(1 for _ in shape[:2]) + shape[2:]
    if scenario == "empty":
        shape = (0, *shape[1:])
    if kind in ("mask", "valid"):
        if scenario == "all masked":
            return np.zeros(shape, dtype=bool)
        if scenario == "one token":
            return np.ones(shape, dtype=bool)
        return MASK[: shape[0], : shape[1]] if kind == "mask" else np.ones(shape, dtype=bool)
    size = {"large": 1.0, "equal": 0.0}.get(scenario, 1.0)
    found = {
        "logs": lambda: -np.abs(generator.normal(size=shape)) - 0.3,
        "real": lambda: generator.normal(size=shape),
        "each": lambda: generator.normal(size=shape),
        "logits": lambda: generator.normal(size=shape),
        "ratio": lambda: np.exp(0.5 * generator.normal(size=shape)),
        "likely": lambda: generator.uniform(size=shape),
        "share": lambda: generator.uniform(0.05, 0.45, size=shape),
        "count": lambda: generator.integers(1, 200, size=shape).astype(float),
    }[kind]()
    if scenario == "equal" and kind in ("logs", "real", "likely", "each"):
        found = np.full(shape, {"logs": -3.7, "likely": 0.1}.get(kind, -3.7))
    if scenario == "large" and size:
        if kind == "logs":
            found = np.where(generator.random(shape) < 0.5, -70.0, -0.1)
        if kind in ("real", "each", "logits"):
            found = found * 1e4
        if kind == "ratio":
            found = np.where(generator.random(shape) < 0.5, 6e4, 1e-4)
    if scenario == "infinite" and kind in ("real", "each"):
        found.flat[1] = math.inf
    if scenario == "impossible":
        if kind == "logs":
            found[..., :1] = -math.inf
        if kind == "logits":
            found[..., -1] = -math.inf
    return found


def rounded(array, dtype):
    """Return a float64 array with the numbers that `dtype` makes of it."""
    if array.dtype == bool:
        return array
    if isinstance(dtype, torch.dtype):
        return torch.from_numpy(array).to(dtype).double().numpy()
    return array.astype(dtype).astype(np.float64)


def convert(array, dtype):
    if isinstance(dtype, torch.dtype):
        tensor = torch.from_numpy(np.array(array))
        return tensor if array.dtype == bool else tensor.to(dtype)
    return array if array.dtype == bool else array.astype(dtype)


def as_tuple(found):
    return found if isinstance(found, tuple) else (found,)


def call(name, number, arrays):
    """Return results, or the error that was raised."""
    _, how = CALLS[name][number]
    function = public()[name]
    try:
        return as_tuple(how(function, *arrays) if how else function(*arrays))
    except (ValueError, TypeError) as error:
        return error


def gradient(name, number, arrays):
    """Return the gradient of the sum of all results, weighted, with respect to the first array."""
    leaf = arrays[0].clone().requires_grad_()
    found = call(name, number, [leaf, *arrays[1:]])
    total = sum(
        (x.double() * (1 + torch.arange(x.numel()) % 5).view(x.shape)).sum()  # exact in all types
        for x in found
    )
    if not total.requires_grad:
        return torch.zeros_like(leaf)
    (slope,) = torch.autograd.grad(total, leaf, materialize_grads=True)
    assert slope.dtype == leaf.dtype
    return slope


def named(name, error):
    """Whether an error speaks of an argument of the function, or of a batch's array."""
    function = public()[name]
    if inspect.isclass(function):
        function = function.__call__
    known = {
        *inspect.signature(function).parameters,
        *vars(Batch)["__dataclass_fields__"],
        "rewards",
    }
    return str(error).split()[0] in known


def largest(dtype):
    return (torch if isinstance(dtype, torch.dtype) else np).finfo(dtype).max


def close(found, expected, dtype):
    """Compare with float64; beyond the type, its largest number or infinity is right."""
    short = str(dtype).removeprefix("torch.").removeprefix("<class 'numpy.").removesuffix("'>")
    relative, absolute = TOLERANCE[short]
    most = largest(dtype)
    found = np.asarray(found.detach().double() if isinstance(found, torch.Tensor) else found)
    found, expected = found.astype(np.float64), np.asarray(expected, dtype=np.float64)
    assert found.shape == expected.shape
    beyond = np.abs(expected) > most * (1 - 1e-3)
    inside = np.where(beyond, 0, found), np.where(beyond, 0, expected)
    size = np.nanmax(np.abs(inside[1]), initial=0)  # sums cancel: what is small beside it may go
    np.testing.assert_allclose(*inside, rtol=relative, atol=absolute + 0.1 * relative * size)
    assert (np.abs(found[beyond]) >= most * (1 - 1e-2)).all()
    assert (np.sign(found[beyond]) == np.sign(expected[beyond])).all()


# NumPy warns of infinities that PyTorch takes in silence; the results say enough.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SCENARIOS = ("ordinary", "equal", "large", "infinite", "impossible", "garbage", "all masked")
SCENARIOS += ("one token", "empty", "NaN")


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("name", "number"), ROWS)
def test_right_number_or_named_error(name, number, scenario):
    kinds, _ = CALLS[name][number]
    generator = np.random.default_rng(7)
    drawn = [draw(kind, scenario, generator) for kind in kinds]
    for label, dtype in DTYPES.items():
        arrays = [rounded(x, dtype) for x in drawn]
        given = arrays
        if scenario == "garbage":
            if not {"mask", "valid"} & set(kinds):
                return
            given = [dirty(x, kinds) for x in arrays]
        if scenario == "NaN":
            given = [
                np.where(
                    MASK[:1] & (np.arange(x.shape[-1]) == 0)
                    if x.ndim == 2
                    else np.indices(x.shape)[-1] == 0,
                    np.nan,
                    x,
                )
                if i == 0
                else x
                for i, x in enumerate(arrays)
            ]
        expected = call(name, number, arrays)
        found = call(name, number, [convert(x, dtype) for x in given])
        if scenario == "NaN":
            if isinstance(found, Exception):
                assert named(name, found), found
            else:
                assert all(bool((x != x).any()) for x in found), (label, found)
            continue
        if isinstance(expected, Exception):
            assert type(found) is type(expected), (label, found, expected)
            assert named(name, found), found
            continue
        assert not isinstance(found, Exception), (label, found)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == dtype, label
            close(one, other, dtype)
        # What is held at the largest number of a type has no gradient.
        held = any(np.nanmax(np.abs(x), initial=0) > largest(dtype) for x in expected)
        if scenario != "infinite" and isinstance(dtype, torch.dtype) and not held:
            slope = gradient(name, number, [convert(x, dtype) for x in given])
            right = gradient(name, number, [convert(x, torch.float64) for x in arrays])
            assert not right.isnan().any()
            close(slope, right, dtype)


def dirty(array, kinds):
    """Put NaN and infinities where nothing may be read."""
    valid = "valid" in kinds
    if array.dtype == bool or array.shape[:2] != MASK.shape or valid:
        return array
    filler = np.resize([np.nan, np.inf, -np.inf, 1e4], array.shape)
    mask = MASK if array.ndim == 2 else MASK[..., None]
    return np.where(mask, array, filler)


# --- samples from public reports, with the right value ---

LN = math.log
INF = math.inf


def slope(function, *arrays, wrt=0):
    """Gradient of the sum of what a function returns; 0 where there is none."""
    leaves = [torch.as_tensor(x, dtype=torch.float64).clone().requires_grad_() for x in arrays]
    total = function(*leaves).sum()
    if not total.requires_grad:
        return torch.zeros_like(leaves[wrt])
    return torch.autograd.grad(total, leaves[wrt], materialize_grads=True)[0]


def test_what_cannot_happen_adds_nothing():
    masked, even = np.array([[0.0, 0.0, -INF]]), np.zeros((1, 3))
    assert entropy(masked) == pytest.approx(LN(2))
    assert categorical_kl(masked, even) == pytest.approx(LN(1.5))
    assert categorical_kl(even, masked) == INF
    assert categorical_kl(masked, masked) == 0
    # By hand: the entropy's gradient is −π (log π + H), which is 0 for two even actions.
    for function in (entropy, lambda x: categorical_kl(x, torch.zeros(1, 3).double())):
        assert slope(function, masked).abs().max() < 1e-12
    never = np.array([-INF, -1.0])
    assert (probability_ratio(never, never) == 1).all()
    assert (slope(probability_ratio, never, never) == torch.tensor([0.0, 1.0])).all()
    for kind in ("k1", "k2", "k3"):
        assert (kl_estimate(never, never, kind) == 0).all()
    assert kl_estimate(never, np.array([-1.0, -1.0]), "k1")[0] == -INF
    # One that only the old policy could take has no weight left.
    assert probability_ratio(never, np.array([-1.0, -1.0]))[0] < 1e-30


def test_an_advantage_of_zero_hides_no_nan():
    """0 · ∞ is 0 there, for what cannot happen; 0 · NaN is NaN."""
    zero, none, never = np.zeros(1), np.array([math.nan]), np.array([-INF])
    for rule in (Unclipped(), CappedWeight(5.0), GammaWeight((2.0, 3.0), (3.0, 2.0))):
        ratio = None if isinstance(rule, Unclipped) else np.ones(1)
        assert np.isnan(rule(ratio, zero, none)).all()
        assert (rule(ratio, zero, never) == 0).all()


def test_old_policy_is_a_constant_even_if_it_is_the_same_tensor():
    logs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss = policy(ALGORITHMS["ppo"], logs, logs, torch.ones(1, 2), torch.ones(1, 2))
    (gradient,) = torch.autograd.grad(loss, logs)
    assert gradient.tolist() == [[-0.5, -0.5]]


@pytest.mark.parametrize(
    ("function", "count", "live"),
    [
        (probability_ratio, 2, {0}),
        (lambda a, b: sequence_ratio(a, b, torch.ones(2, 3)), 2, {0}),
        (lambda a, b: importance_weight(a, b, 2.0), 2, set()),
        *((partial(lambda k, a, b: kl_estimate(a, b, k), k), 2, {0}) for k in ("k1", "k2", "k3")),
        (lambda a, b: approx_kl(a, b, torch.ones(2, 3)), 2, {0}),
        (lambda v, r, old: value_loss(v, r, old, 0.1), 3, {0}),
        (Clip(0.2), 2, {0}),
        (DualClip(0.2, dual_clip=3.0), 2, {0}),
        (SoftGate(1.0, 1.05), 2, {0}),
        (lambda r, a, logs: CappedWeight(5.0)(r, a, logs), 3, {2}),
        (lambda r, a, logs: GammaWeight((2.0, 3.0), (3.0, 2.0))(r, a, logs), 3, {2}),
        (lambda a, logs: Unclipped()(None, a, logs), 2, {1}),
        *(
            (partial(lambda r, *x: loss_of(r, *x, torch.ones(2, 3), **fixed(r)), row), 6, {0, 3})
            for row in ALGORITHMS.values()
        ),
    ],
)
def test_only_what_is_trained_has_a_gradient(function, count, live):
    generator = torch.Generator().manual_seed(1)
    arrays = [0.3 + torch.rand(2, 3, generator=generator) for _ in range(count)]
    found = {i for i in range(count) if slope(function, *arrays, wrt=i).abs().sum() > 0}
    assert found == live


def test_returns_that_were_made_from_live_values_are_constants():
    values = torch.tensor([[0.5, 0.6, 0.7]], requires_grad=True)
    mask, rewards = torch.ones(1, 3), torch.tensor([[0.0, 0.0, 1.0]])
    _, returns = gae(rewards, values, mask)
    loss = value_loss(values, returns).sum()
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, (values - returns).detach())


@pytest.mark.parametrize("dtype", [np.float32, np.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.1, -3.7, 1000.1, 1e-4])
@pytest.mark.parametrize("epsilon", [0, 1e-8])
def test_equal_values_are_whitened_to_zero(dtype, value, epsilon):
    values = convert(np.full((1, 7), value), dtype)
    functions = [
        lambda x: whiten(x, x == x, epsilon=epsilon),
        leave_one_out,
        *(
            partial(lambda s, x: group_relative(x, scale=s, epsilon=epsilon), scale)
            for scale in ("none", "group", "batch")
        ),
    ]
    for function in functions:
        found = function(values)
        assert (found == 0).all()
        assert found.dtype == dtype
        assert (slope(function, np.full((1, 7), value)) == 0).all()
    assert math.isnan(explained_variance(np.zeros((1, 7)), np.full((1, 7), value), np.ones((1, 7))))


def test_values_that_hardly_differ_are_told_apart():
    for dtype, gap in ((np.float32, 2e-4), (np.float64, 1e-9)):
        values = np.array([[1000.1, 1000.1 * (1 + gap)]], dtype=dtype)
        found = whiten(values, np.ones((1, 2)), epsilon=0)
        np.testing.assert_allclose(found, [[-1, 1]], rtol=1e-3)
        found = group_relative(values, epsilon=0)
        np.testing.assert_allclose(found, [[-math.sqrt(0.5), math.sqrt(0.5)]], rtol=1e-3)


def test_a_group_that_is_equal_but_for_rounding_teaches_nothing():
    """The same three rewards, added up in three orders."""
    rewards = np.array([[0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.1 + 0.3 + 0.2]])
    assert len(set(rewards[0])) > 1
    assert (group_relative(rewards, epsilon=0) == 0).all()
    assert (leave_one_out(rewards) == 0).all()


def test_kl_controller_never_turns_negative_and_never_leaps():
    arguments = {"target": 1, "horizon": 10}
    assert adaptive_kl_weight(0.1, 0.0, samples=128, **arguments) == pytest.approx(0.08)
    assert adaptive_kl_weight(0.1, 1e9, samples=10**9, **arguments) == pytest.approx(0.12)
    assert adaptive_kl_weight(0.1, 0.0, samples=5, **arguments) == pytest.approx(0.09)


def test_k3_of_small_and_of_far_ratios():
    for dtype in (np.float32, np.float64):
        d = (np.geomspace(1e-9, 40, 4000) * np.resize([1, -1], 4000)).astype(dtype)
        with mpmath.workdps(50):
            exact = [mpmath.mpf(float(x)) for x in d]
            right = np.array([float(mpmath.expm1(-x) + x) for x in exact])
        assert (k3(d) >= 0).all()
        np.testing.assert_allclose(k3(d), right, rtol=1e-4 if dtype == np.float32 else 1e-10)
    half = torch.linspace(-0.1, 0.1, 999).bfloat16()
    assert (k3(half) >= 0).all()
    far = torch.tensor([-200.0, -80.5, -79.0, 79.0, 200.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(k3(far).sum(), far)
    assert (gradient[:3] <= 0).all()  # descending raises what fell too far, or lets it be
    assert gradient[3:].tolist() == [1, 1]


def test_half_precision():
    ones = torch.ones(1, 3000)
    assert discounted_returns(ones.bfloat16(), ones)[0, 0] == 3008  # 3000, to 8 bits
    assert masked_mean(torch.ones(70_000).half(), torch.ones(70_000)) == 1
    whitened = whiten(torch.tensor([[-300.0, 300.0]]).half(), torch.ones(1, 2))
    assert whitened.tolist() == [[-1, 1]]
    assert whitened.dtype == torch.float16
    ratio = probability_ratio(torch.tensor([0.0]).half(), torch.tensor([-100.0]).half())
    assert ratio == 65504
    assert Clip(0.2)(ratio, torch.zeros(1).half()) == 0
    # GSPO's ratio is exp(2^-11) = 1.0005, beyond its range of 4e-4: nothing is left to push.
    new = torch.full((1, 4), -1.0 + 2**-11).half().requires_grad_()
    old, advantage = torch.full((1, 4), -1.0).half(), torch.ones(1, 1).half()
    loss = policy(ALGORITHMS["gspo"], new, old, advantage, torch.ones(1, 4))
    assert loss.dtype == torch.float16
    (gradient,) = torch.autograd.grad(loss, new)
    assert (gradient == 0).all()


def test_types_mix_as_the_library_mixes_them():
    one, mask = torch.ones(1, 2), torch.ones(1, 2)
    assert masked_mean(one.bfloat16(), mask).dtype == torch.bfloat16
    assert probability_ratio(one.bfloat16(), one).dtype == torch.float32
    assert probability_ratio(one.bfloat16(), one.half()).dtype == torch.float32
    assert probability_ratio(one.double(), one.half()).dtype == torch.float64


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.array([[0.0, -INF]]), ValueError, "mask must be true or false, or exactly 0 or 1"),
        (np.array([[1.0, 0.5]]), ValueError, "mask must be true or false, or exactly 0 or 1"),
        (np.array([[1, -1]]), ValueError, "mask must be true or false, or exactly 0 or 1"),
        (np.array([[1.0, np.nan]]), ValueError, "mask must be true or false, or exactly 0 or 1"),
        (np.array([[1, 0j]]), TypeError, "mask must be of bool or of 0 and 1, got complex128"),
        (np.array([["1", "0"]]), TypeError, "mask must be of bool or of 0 and 1, got <U1"),
        ([[1, 0]], TypeError, "mask must be an array of bool or of 0 and 1, got"),
        (None, TypeError, "mask must be an array of bool or of 0 and 1, got None"),
    ],
)
def test_masks_are_true_and_false(mask, error, message):
    values = np.ones((1, 2))
    with pytest.raises(error, match=f"^{message}"):
        masked_mean(values, mask)
    with pytest.raises(error, match=f"^{message}"):
        policy(ALGORITHMS["ppo"], values, values, values, mask)


ONES = np.ones((2, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: value_loss(ONES, ONES, np.ones(3), 0.2, ONES), "old_values must be of shape"),
        (lambda: clip_fraction(Clip(0.2), ONES, np.ones(2), ONES), "advantage must be of shape"),
        (lambda: clip_fraction(Clip(0.2), np.ones(3), ONES, ONES), "ratio must be of shape"),
        (lambda: kl_estimate(ONES, ONES, "k1", ratio=np.ones(3)), "ratio must be of shape"),
        (lambda: categorical_kl(ONES, ONES[:, :1]), "ref_logits must be of 3 actions"),
        (
            lambda: policy(ALGORITHMS["ppo"], ONES, ONES, np.ones(2), ONES),
            r"advantages must be of shape \(2, 3\) or \(2, 1\), got \(2,\)",
        ),
        (lambda: whiten(ONES, ONES, epsilon=-1.0), "epsilon must be at least 0, got -1.0"),
        (lambda: whiten(ONES, ONES, epsilon=math.nan), "epsilon must be at least 0, got nan"),
        (lambda: group_relative(ONES, epsilon=INF), "epsilon must be finite, got inf"),
        (lambda: group_relative(ONES, ddof=-1), "ddof must be at least 0, got -1"),
        (lambda: Clip(math.nan), "clip_range must be above 0, got nan"),
        (lambda: Clip(-0.2), "clip_range must be above 0, got -0.2"),
        (lambda: CappedWeight(math.nan), "cap must be above 1, got nan"),
        (lambda: SoftGate(INF, 1.0), "temperature_positive must be finite, got inf"),
        (lambda: GammaWeight((1.0,), (1.0, 2.0)), "shape_positive must be two finite numbers"),
        (lambda: GammaWeight((1.0, INF), (1.0, 2.0)), "shape_positive must be two finite numbers"),
        (
            lambda: policy(ALGORITHMS["grpo"], ONES, ONES, ONES, ONES, kl_weight=INF),
            "kl_weight must be finite, got inf",
        ),
        (lambda: aggregate(ONES, ONES, "mean"), "how must be one of token, sequence, fixed, sum"),
        (lambda: aggregate(ONES, ONES, "fixed", length=INF), "length must be finite, got inf"),
        (
            lambda: adaptive_kl_weight(0.1, math.nan, target=1, horizon=1, samples=1),
            "kl must be at least 0, got nan",
        ),
        (
            lambda: adaptive_kl_weight(INF, 1, target=1, horizon=1, samples=1),
            "kl_weight must be finite, got inf",
        ),
        (lambda: linear_kl_weight(INF, 1, 0.5), "first must be finite, got inf"),
        (lambda: simulate(0.1, kl_weight=INF), "kl_weight must be finite, got inf"),
    ],
)
def test_shapes_and_numbers_out_of_range(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: entropy([[0.0, 0.0]]), "logits"),
        (lambda: probability_ratio(None, ONES), "log_probs"),
        (lambda: probability_ratio(ONES, [1.0]), "old_log_probs"),
        (lambda: sequence_ratio([1.0], ONES, ONES), "log_probs"),
        (lambda: masked_mean([1.0], ONES), "values"),
        (lambda: masked_mean("1", ONES), "values"),
        (lambda: gae([1.0], ONES, ONES), "rewards"),
        (lambda: gae(ONES, None, ONES), "values"),
        (lambda: discounted_returns([1.0], ONES), "rewards"),
        (lambda: gae(ONES, ONES, ONES, gamma="1"), "gamma"),
        (lambda: group_relative([[1.0, 2.0]]), "rewards"),
        (lambda: leave_one_out([[1.0, 2.0]]), "rewards"),
        (lambda: group_relative(ONES, ddof=0.5), "ddof"),
        (lambda: group_relative(ONES, epsilon="0"), "epsilon"),
        (lambda: explained_variance([1.0], ONES, ONES), "values"),
        (lambda: approx_kl([1.0], ONES, ONES), "log_probs"),
        (lambda: clip_fraction(Clip(0.2), [1.0], ONES, ONES), "ratio"),
        (lambda: value_loss(None, ONES), "values"),
        (lambda: Clip("0.2"), "clip_range"),
        (lambda: Clip([0.2]), "clip_range"),
        (lambda: CappedWeight(None), "cap"),
        (lambda: GammaWeight([1.0, 2.0], (1.0, 2.0)), "shape_positive"),
        (lambda: GammaWeight(("1", 2.0), (1.0, 2.0)), "shape_positive"),
        (lambda: importance_weight(ONES, ONES, None), "cap"),
        (lambda: policy(ALGORITHMS["ppo"], [1.0], ONES, ONES, ONES), "log_probs"),
        (lambda: policy(ALGORITHMS["ppo"], ONES, None, ONES, ONES), "old_log_probs"),
        (lambda: k3("1"), "d"),
        (lambda: best_of_n_kl_bound("2"), "n"),
    ],
)
def test_what_is_no_number_is_refused_by_name(call, name):
    with pytest.raises(TypeError, match=f"^{name} must be"):
        call()


def test_plain_numbers_work_where_arrays_do():
    assert Clip(0.2)(1.3, -0.8) == pytest.approx(-1.04)
    assert Unclipped()(1.3, 2) == pytest.approx(2.6)
    assert Unclipped()(None, 2.0, -1.5) == -3
    assert CappedWeight(2.0)(3.0, 1.5, -1.0) == -3
    assert DualClip(0.2, dual_clip=3.0)(4.0, -1.0) == -3
    assert SoftGate(1.0, 1.0)(1.0, 1.0) == 2
    assert GammaWeight((2.0, 3.0), (3.0, 2.0))(1.0, 1.0, -2.0) == -2
    assert probability_ratio(-1.0, -1.0 - LN(2)) == pytest.approx(2)
    assert kl_estimate(-1.0, -1.5, "k1") == 0.5
    assert importance_weight(-1.0, -3.0, 2.0) == 2
    assert value_loss(1.0, 3.0) == 2
    assert k3(0.5) == pytest.approx(math.exp(-0.5) - 0.5)
    assert best_of_n_kl_bound(4) == pytest.approx(LN(4) - 0.75)


@pytest.mark.parametrize("garbage", [math.nan, INF, -INF])
def test_a_ratio_on_padding_is_not_read(garbage):
    logs, ref = torch.tensor([[-1.0, -2.0]], requires_grad=True), torch.tensor([[-1.5, -1.0]])
    mask, ratio = torch.tensor([[1, 0]]), torch.tensor([[1.2, garbage]])
    for kind in ("k1", "k2", "k3"):
        estimate = kl_estimate(logs, ref, kind, mask, ratio)
        assert estimate[0, 1] == 0
        assert torch.isfinite(torch.autograd.grad(estimate.sum(), logs)[0]).all()


def test_advantage_of_a_completion_without_tokens_is_not_read():
    logs = torch.full((2, 3), -1.0, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    loss = policy(ALGORITHMS["ppo"], logs, logs, torch.tensor([[1.0], [math.nan]]), mask)
    assert loss == -1
    assert torch.autograd.grad(loss, logs)[0].tolist() == [[-0.5, -0.5, 0], [0, 0, 0]]
