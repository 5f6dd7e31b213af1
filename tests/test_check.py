"""A checker that finds each known fault, and finds none where there is none."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ppo_demo import __main__ as command_line
from ppo_demo import check
from ppo_demo.algorithms import ALGORITHMS
from ppo_demo.check import policy

CHECKED = list(ALGORITHMS)
# Each kind of loss once in the everyday subset.
EVERYDAY = ("reinforce", "ppo", "grpo", "gspo", "cispo", "sapo")


def by_hand(row, log_probs, old, advantages, mask):
    """A policy loss written out token by token, of plain numbers or tensors of one element."""
    exp, low, high = math.exp, min, max
    if isinstance(log_probs, torch.Tensor):
        exp, low, high = torch.exp, torch.minimum, torch.maximum
    totals, counts, every = [], [], 0
    for b in range(log_probs.shape[0]):
        real = [t for t in range(log_probs.shape[1]) if mask[b, t]]
        gaps = {t: log_probs[b, t] - old[b, t] for t in real}
        whole = sum(gaps.values()) / len(real)
        total = 0
        for t in real:
            a = advantages[b, t]
            r = exp({"token": gaps[t], "sequence": whole}.get(row.ratio, sum(gaps.values())))
            name = type(row.clip).__name__
            if row.ratio == "none":
                found = a * log_probs[b, t]
            elif name == "Clip":
                one = r / r
                top, bottom = one * (1 + row.clip.high), one * (1 - row.clip.clip_range)
                if isinstance(r, torch.Tensor):
                    top, bottom = top.detach(), bottom.detach()
                found = low(r * a, high(low(r, top), bottom) * a)
            elif name == "CappedWeight":
                weight = min(float(r.detach() if isinstance(r, torch.Tensor) else r), row.clip.cap)
                found = weight * a * log_probs[b, t]
            elif name == "GammaWeight":
                k, lam = row.clip.shape_positive if a > 0 else row.clip.shape_negative
                w = float(r.detach() if isinstance(r, torch.Tensor) else r)
                found = w**k * math.exp(lam * (1 - w)) * a * log_probs[b, t]
            elif name == "SoftGate":
                tau = row.clip.temperature_positive if a > 0 else row.clip.temperature_negative
                found = 4 / tau / (1 + exp(-tau * (r - 1))) * a
            total = total + found
        totals.append(total)
        counts.append(len(real))
        every += len(real)
    size = len(totals)
    return {
        "token": lambda: -sum(totals) / every,
        "sequence": lambda: -sum(t / n for t, n in zip(totals, counts, strict=True)) / size,
        "fixed": lambda: -sum(totals) / size / policy.LENGTH,
        "sum": lambda: -sum(totals) / size,
    }[row.aggregation]()


@pytest.mark.parametrize("factor", [1, 0.25])
@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize(
    "key",
    [key if key in EVERYDAY else pytest.param(key, marks=pytest.mark.slow) for key in CHECKED],
)
def test_no_false_alarm(key, library, factor):
    row = ALGORITHMS[key]
    report = check.policy_loss(lambda *x: factor * by_hand(row, *x), key, library=library)
    assert report, report
    assert not report.causes
    assert (f"{factor} times ours" in repr(report)) == (factor != 1)


def test_parts_put_together_are_the_loss():
    for key in CHECKED:
        assert check.policy_loss(policy.parts(ALGORITHMS[key]), key, constants=True), key


def widened(function):
    """Of parts that compute in float32, as those that check themselves do."""
    return lambda *given: function(*(x.float() if x.dtype == torch.float16 else x for x in given))


SINGLE = [
    pytest.param(
        key,
        fault,
        id=f"{key}: {fault.name}",
        marks=[] if key == "ppo" else pytest.mark.slow,
    )
    for key in CHECKED
    for fault in policy.FAULTS
    if fault.change(ALGORITHMS[key])
]


@pytest.mark.parametrize(("key", "fault"), SINGLE)
def test_each_fault_alone_is_named(key, fault):
    row = ALGORITHMS[key]
    wrong = replace(policy.parts(row), **fault.change(row))
    report = check.policy_loss(widened(wrong), key, constants=True, half=True)
    if fault.convention:
        assert report
        assert f"convention: {fault.name}" in report.notes
        return
    assert not report
    assert fault.name in report.causes
    assert len(report.causes) == 1, report.causes  # no two faults are taken for one another
    assert fault.effect in repr(report)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["ppo", "grpo", "gspo", "sapo"])
def test_pairs_are_named(key):
    row = ALGORITHMS[key].__class__(**{**vars(ALGORITHMS[key]), "kl": "none", "kl_estimator": None})
    subject = policy.subject(row)
    pairs = [n for n in subject.combinations(2) if not any(f.convention for f in n)]
    named = 0
    for names in pairs:
        wrong = widened(subject.changed(names))
        report = check.policy_loss(wrong, row, constants=True, half=True)
        # One that hides the other, such as a ratio of 1 where nothing is clipped, is named alone.
        both = {f.name for f in names}
        named += any(set(cause.split("; and ")) <= both for cause in report.causes)
    print(f"{key}: {named} of {len(pairs)} pairs are named")
    assert len(pairs) > 20
    assert named >= 0.9 * len(pairs)


def test_a_right_loss_in_float32_is_right():
    def loss(logs, old, advantages, mask):
        ratio = torch.where(mask, logs.float() - old.float(), 0).exp()
        a = torch.where(mask, advantages.float(), 0)
        return -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)[mask].mean()

    assert check.policy_loss(loss)


def my_loss(log_probs, old_log_probs, advantages, _):
    ratio = (log_probs - old_log_probs).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def test_the_loss_that_forgets_its_mask():
    report = check.policy_loss(my_loss)
    assert not report
    assert report.causes == ("the mean runs over padding too",)
    assert set(report.failed) == {"completions of several lengths", "garbage on padding"}
    with pytest.raises(AssertionError, match="what fits: the mean runs over padding too"):
        assert check.policy_loss(my_loss)


def test_constants_are_asked_for_on_demand():
    def undetached(logs, old, advantages, mask):
        ratio = torch.where(mask, logs - old, 0).exp()
        a = torch.where(mask, advantages, 0)
        return -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)[mask].mean()

    assert check.policy_loss(undetached)
    report = check.policy_loss(undetached, constants=True)
    (cause,) = report.causes
    assert cause == (
        "the old log-probabilities are not constants; and the advantages are not constants"
    )


def test_a_fault_that_nobody_knows_is_shown_token_by_token():
    report = check.policy_loss(lambda lp, _, a, m: -(lp * a**3)[m].sum())
    assert not report.causes
    text = repr(report)
    assert "no known fault fits. The smallest batch that shows it, 'one token'" in text
    header = "log_probs old_log_probs advantages your gradient our gradient"
    assert header in " ".join(text.split())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda *_: None, "it returned None: is there a `return`?"),
        (lambda lp, *_: lp, "it returned shape (3, 4) where one number is wanted"),
        (lambda *_: torch.tensor(1), "it returned integers: 1"),
        (lambda *_: 1.0, "it returned float, which has no gradient"),
        (lambda lp, *_: lp[:, 99].sum(), "it raised IndexError: index 99 is out of bounds"),
    ],
)
def test_what_is_no_loss_is_told_so(loss, message):
    report = check.policy_loss(loss)
    assert not report
    assert message in repr(report)
    assert "on 'first update'" in repr(report)
    assert "log_probs of shape (3, 4)" in repr(report)


def test_nan_on_real_tokens_is_seen():
    report = check.policy_loss(lambda lp, *_: lp.sum() * math.nan)
    assert set(report.failed) >= {"first update", "one token"}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: check.policy_loss(3), TypeError, "the function to check must be one, got 3"),
        (lambda: check.policy_loss(my_loss, "trpo"), ValueError, "algorithm must be one of"),
        (lambda: check.policy_loss(my_loss, library="tf"), ValueError, "library must be one of"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_numpy_losses_are_checked_by_differences():
    def loss(logs, old, advantages, mask):
        ratio = np.exp(logs - old)
        return -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)[mask].mean()

    assert check.policy_loss(loss, library="numpy")
    report = check.policy_loss(lambda *x: -loss(*x), library="numpy")
    assert report.causes == (
        "the sign is that of an objective: it is maximised when it is minimised",
    )


MODULE = """
import torch

def loss(logs, old, advantages, mask):
    ratio = torch.where(mask, logs - old, 0).exp()
    a = torch.where(mask, advantages, 0)
    return -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)[mask].mean()

def wrong(*given):
    return -loss(*given)

def k3(logs, ref):
    return (ref - logs).exp() - 1 - (ref - logs)
"""


def run(capsys, *arguments):
    """The command's exit status and what it printed."""
    with pytest.raises(SystemExit) as ended:
        command_line.main(["check", *arguments])
    return ended.value.code, capsys.readouterr().out


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_losses.py").write_text(MODULE)
    status, out = run(capsys, "my_losses:loss")
    assert (status, out.splitlines()[0]) == (0, "policy loss against PPO's, in torch: agrees")
    status, out = run(capsys, "my_losses:wrong")
    assert status == 1
    assert "what fits: the sign is that of an objective" in out
    status, out = run(capsys, "my_losses:loss", "--algorithm", "grpo", "--json")
    report = json.loads(out)
    assert (status, report["holds"]) == (1, False)
    assert report["causes"] == ["the mean is over all tokens where each completion has its own"]
    for place in ("my_losses", "my_losses:none", "no_such_module:loss"):
        status, _ = run(capsys, place)
        assert status.startswith("error: --function must be MODULE:FUNCTION, got")
    status, out = run(capsys, "my_losses:k3", "--kind", "kl", "--estimator", "k1")
    assert status == 1
    assert "what fits: it is k3" in out
    status, _ = run(capsys, "my_losses:k3", "--kind", "kl")
    assert status == 0
    status, _ = run(capsys, "my_losses:k3", "--kind", "kl", "--gamma", "0.0")
    assert status == "error: --gamma must be left out for --kind kl, got 0.0"
    status, _ = run(capsys, "my_losses:loss", "--algorithm", "trpo")
    assert status.startswith("error: --algorithm must be one of")
