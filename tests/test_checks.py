"""The other checkers: right functions pass, each known fault is named, and pairs mostly are."""

import math
from collections import Counter

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ppo_demo import check
from ppo_demo.algorithms import ALGORITHMS
from ppo_demo.check import credit, critic, divergence, policy, scoring, update
from ppo_demo.check.report import compare
from ppo_demo.lm.coins import COMPLETION_LENGTH

GROUPS = ("reinforce", "rloo", "grpo", "dr_grpo", "maxrl")
SUBJECTS = [
    critic.subject(None),
    critic.subject(0.2),
    scoring.subject(1.0),
    scoring.subject(0.7),
    *(divergence.subject(k, u) for k in ("k1", "k2", "k3", "exact") for u in ("value", "loss")),
    credit.over_time(1.0, 0.95),
    credit.over_time(0.9, 0.8),
    *(credit.over_groups(ALGORITHMS[key]) for key in GROUPS),
    update.subject(ALGORITHMS["ppo"]),
    update.subject(ALGORITHMS["dr_grpo"]),
]
by_title = pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.title)


def widened(function):
    """Of parts that compute in float32, as those that check themselves do."""
    return lambda *given: function(*(x.float() if x.dtype == torch.float16 else x for x in given))


def checked(function, subject):
    return compare(widened(function), subject, constants=True, half=True)


@by_title
def test_parts_put_together_are_right(subject):
    if subject.title.startswith("KL"):
        return  # they have no parts but the estimate
    report = checked(subject.build(), subject)
    assert report, report
    assert not report.notes


@by_title
def test_each_fault_alone_is_named(subject):
    confused = Counter()
    for (fault,) in subject.combinations(1):
        report = checked(subject.changed((fault,)), subject)
        if fault.convention:
            assert report, report
            assert f"convention: {fault.name}" in report.notes
        else:
            assert not report, fault.name
            assert f"{fault.name}: {fault.effect}. One notices: {fault.sign}." in report.notes
        for cause in report.causes:
            confused[fault.name, cause] += 1
    print(f"\n{subject.title}: fault and what was named")
    for (fault, cause), count in confused.items():
        print(f"  {count} {'=' if fault == cause else 'x'} {fault}  ->  {cause}")
    assert all(fault == cause for fault, cause in confused)


@pytest.mark.slow
@by_title
def test_pairs_are_named(subject):
    pairs = [n for n in subject.combinations(2) if not any(f.convention for f in n)]
    pairs = pairs[::6] if subject.title.startswith("a step") else pairs
    named = 0
    for names in pairs:
        report = checked(subject.changed(names), subject)
        # One that hides the other is named alone.
        both = {f.name for f in names}
        named += any(set(cause.split("; and ")) <= both for cause in report.causes)
    print(f"{subject.title}: {named} of {len(pairs)} pairs are named")
    assert named >= 0.9 * len(pairs)


def test_the_catalogue():
    every = [
        *policy.FAULTS,
        *critic.FAULTS,
        *divergence.FAULTS,
        *credit.TIME_FAULTS,
        *credit.GROUP_FAULTS,
        *scoring.FAULTS,
        *update.FAULTS,
    ]
    assert len([f for f in every if not f.convention]) >= 70
    for fault in every:
        assert fault.effect
        assert fault.sign
    row = ALGORITHMS["ppo"]
    for kind in (policy.FAULTS, critic.FAULTS, credit.TIME_FAULTS, scoring.FAULTS, update.FAULTS):
        names = [fault.name for fault in kind]
        assert len(set(names)) == len(names)
    assert row.name == "PPO"


def test_two_faults_that_no_input_can_tell_apart_are_both_reported():
    # With γ = λ = 1, δ = r sums to the return.
    subject = credit.over_time(1.0, 1.0)
    (same, returns) = (
        next(f for f in credit.TIME_FAULTS if f.name.startswith(start))
        for start in ("the value of the same", "returns are taken")
    )
    report = checked(subject.changed((same,)), subject)
    assert report.causes == (same.name, returns.name)


# --- right functions, written out ---


def value_by_hand(clip_range, factor=1.0, mean=True):
    def loss(values, old, returns, mask):
        total, count = 0, 0
        for b in range(values.shape[0]):
            for t in range(values.shape[1]):
                if not mask[b, t]:
                    continue
                found = (values[b, t] - returns[b, t]) ** 2
                if clip_range is not None:
                    moved = (values[b, t] - old[b, t]).item()
                    held = old[b, t] + max(-clip_range, min(clip_range, moved))
                    if -clip_range < moved < clip_range:
                        held = values[b, t]
                    other = (held - returns[b, t]) ** 2
                    found = other if other.item() > found.item() else found
                total, count = total + 0.5 * found, count + 1
        return factor * total / (count if mean else 1)

    return loss


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("clip_range", [None, 0.2, 1.0])
@pytest.mark.parametrize(("factor", "mean"), [(1, True), (2, True), (0.5, True), (1, False)])
def test_value_loss(library, clip_range, factor, mean):
    loss = value_by_hand(clip_range, factor, mean)
    report = check.value_loss(loss, clip_range, library=library)
    assert report, report
    said = {(1, True): "", (1, False): "the sum over the tokens"}.get(
        (factor, mean), f"{factor} times ours"
    )
    assert said in " ".join(report.notes)
    assert bool(report.notes) == ((factor, mean) != (1, True))


def test_value_loss_of_torch_itself():
    def loss(values, _, returns, mask):
        return F.mse_loss(values[mask], returns[mask])

    report = check.value_loss(loss)
    assert report
    assert report.notes == ("convention: 2 times ours; the learning rate could do the same",)
    assert not check.value_loss(loss, half=True)  # the square of 320 is beyond float16
    assert check.value_loss(lambda v, o, r, m: loss(v.float(), o, r.float(), m), half=True)
    report = check.value_loss(lambda v, _, r, __: F.mse_loss(v, r))
    assert report.causes == ("the mean runs over padding too",)
    assert "convention: 2 times ours" in repr(report)


def kl_by_hand(kind):
    def estimate(log_probs, ref):
        exp = torch.exp if isinstance(log_probs, torch.Tensor) else np.exp
        if kind == "exact":
            exps = exp(log_probs), exp(ref)
            p, q = (e / e.sum(-1)[..., None] for e in exps)
            log = torch.log if isinstance(p, torch.Tensor) else np.log
            gap = log(p) - log(q)
            gap[p == 0] = 0
            return (p * gap).sum(-1)
        d = log_probs - ref
        return {"k1": d, "k2": d * d / 2, "k3": exp(-d) - 1 + d}[kind]

    return estimate


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "exact"])
def test_kl_values(library, kind):
    report = check.kl(kl_by_hand(kind), kind, library=library)
    assert report, report
    assert not report.notes
    for other in {"k1", "k2", "k3"} - {kind, "exact"}:
        if kind != "exact":
            (cause,) = check.kl(kl_by_hand(other), kind, library=library).causes
            assert cause == f"it is {other}"


def test_kl_as_a_loss():
    """T16 of the book's facts: only k2 has the gradient that is meant."""
    assert check.kl(kl_by_hand("k2"), "k2", use="loss")
    assert not check.kl(kl_by_hand("k2"), "k2", use="loss").notes
    report = check.kl(kl_by_hand("k1"), "k1", use="loss")
    assert report.causes == ("it is k1, whose gradient is 0 on average",)
    report = check.kl(kl_by_hand("k3"), "k3", use="loss")
    assert report
    assert "the KL from the reference to the policy" in report.notes[0]
    assert check.kl(lambda p, q: 3 * kl_by_hand("exact")(p, q), "exact", use="loss")
    # Weighted by the ratio to the policy that sampled, k1 and k3 have it too.
    for kind in ("k1", "k3"):
        estimate = kl_by_hand(kind)
        weighted = lambda lp, ref, e=estimate: (lp - lp.detach()).exp() * e(lp, ref)  # noqa: E731
        assert check.kl(weighted, kind, use="loss")


def test_kl_of_torch_itself():
    def right(logits, ref):
        logs = (F.log_softmax(ref, -1), F.log_softmax(logits, -1))
        return F.kl_div(*logs, log_target=True, reduction="none").nansum(-1)

    assert check.kl(right, "exact")

    def exchanged(logits, ref):
        logs = (F.log_softmax(logits, -1), F.log_softmax(ref, -1))
        return F.kl_div(*logs, log_target=True, reduction="none").sum(-1)

    report = check.kl(exchanged, "exact")
    assert report.causes == ("the other KL is taken: from the reference to the policy",)

    def logarithms(logits, ref):
        logs = (F.log_softmax(ref, -1), F.log_softmax(logits, -1))
        return F.kl_div(*logs, reduction="none").sum(-1)

    (cause,) = check.kl(logarithms, "exact").causes
    assert cause == "`kl_div` is given logarithms without `log_target=True`"


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize(("gamma", "lam"), [(1, 0.95), (0.9, 0.8), (1, 1), (1, 0)])
def test_advantages_over_time(library, gamma, lam):
    def by_sums(rewards, values, mask):
        """Equation 16 of the paper as it stands: a sum over later residuals."""
        found = rewards * 0
        for b in range(rewards.shape[0]):
            real = [t for t in range(rewards.shape[1]) if mask[b, t]]
            v = [values[b, t] for t in real] + [0]
            deltas = [rewards[b, t] + gamma * v[i + 1] - v[i] for i, t in enumerate(real)]
            for i, t in enumerate(real):
                later = enumerate(deltas[i:])
                found[b, t] = sum((gamma * lam) ** k * delta for k, delta in later)
        return found

    report = check.advantages(by_sums, gamma=gamma, lam=lam, library=library)
    assert report, report
    report = check.advantages(
        lambda r, v, m: by_sums(r, v, m) + v, gamma=gamma, lam=lam, library=library
    )
    assert "returns are taken for advantages" in report.causes


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("key", GROUPS)
def test_advantages_over_groups(library, key):
    def one_by_one(rewards, ddof=1, epsilon=1e-4):
        found = rewards * 0
        every = [float(x) for x in rewards.reshape(-1)]
        for p in range(rewards.shape[0]):
            row = [float(x) for x in rewards[p]]
            size = len(row)
            mean = sum(row) / size
            for g, r in enumerate(row):
                left = r - mean
                if key == "reinforce":
                    left = r - sum(every) / len(every)
                elif key == "rloo":
                    left = r - sum(row[:g] + row[g + 1 :]) / (size - 1)
                elif key == "grpo":
                    root = math.sqrt(sum((x - mean) ** 2 for x in row) / (size - ddof))
                    left = left / (root + epsilon)
                elif key == "maxrl":
                    left = left / mean if mean else 0
                found[p, g] = left
        return found

    report = check.advantages(one_by_one, key, library=library)
    assert report, report
    assert not report.notes
    if key == "grpo":
        for change, said in (
            ({"ddof": 0}, "population"),
            ({"epsilon": 1e-6}, "ε is 1e-6"),
            ({"epsilon": 1e-8}, "ε is 1e-8"),
        ):
            report = check.advantages(lambda r, c=change: one_by_one(r, **c), key, library=library)
            assert report
            assert said in " ".join(report.notes)


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_log_probs(library, temperature):
    def score(logits, tokens):
        xp = torch if isinstance(logits, torch.Tensor) else np
        rows = []
        for b in range(logits.shape[0]):
            row = []
            for t in range(logits.shape[1] - 1):
                z = logits[b, t] / temperature
                z = z - z.max()
                row.append(z[tokens[b, t + 1]] - xp.log(xp.exp(z).sum()))
            rows.append(xp.stack(row))
        return xp.stack(rows)

    report = check.token_log_probs(score, temperature, library=library)
    assert report, report
    report = check.token_log_probs(score, 1.3, library=library)
    assert ("the temperature is left out" in report.causes) == (temperature == 1.0)


def test_token_log_probs_of_another_shape():
    report = check.token_log_probs(lambda logits, _: F.log_softmax(logits[:, :-1], -1))
    assert "it returned shape (1, 1, 3) where shape (1, 1) is wanted: take the entry" in repr(
        report
    )
    report = check.token_log_probs(lambda logits, _: logits.sum((1, 2)))
    assert "it was summed or averaged" in repr(report)


def step_by_hand(model, optimizer, sampled):
    """A step in plain PyTorch, from nothing of this package."""
    batch = sampled.batch
    logits, values = model(batch.tokens)
    logits, values, mask = logits[:, :-1], values[:, :-1], batch.mask
    logs = torch.log_softmax(logits, -1)
    chosen = logs.gather(-1, batch.tokens[:, 1:, None])[..., 0]
    ratio = torch.exp(chosen - batch.old_log_probs)
    a = batch.advantages
    policy_loss = torch.max(-ratio * a, -ratio.clamp(0.8, 1.2) * a)[mask].mean()
    kl = (logs.exp() * (logs - torch.log_softmax(batch.ref_logits, -1))).sum(-1)[mask].mean()
    value = ((values - batch.returns) ** 2)[mask].mean() / 2
    optimizer.zero_grad()
    (policy_loss + 0.5 * value + 0.05 * kl).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def test_step():
    report = check.step(step_by_hand)
    assert report, report
    assert not report.notes
    report = check.step(step_by_hand, "grpo")
    assert set(report.failed) == set(check.step(step_by_hand).held)  # another mean
    assert COMPLETION_LENGTH == 8
    report = check.step(lambda *_: None)
    assert report.causes == ("the optimiser makes no step",)


def test_half_precision_is_asked_for():
    def loss(logs, old, a, mask):
        ratio = (logs[mask] - old[mask]).exp()
        return -torch.min(ratio * a[mask], ratio.clamp(0.8, 1.2) * a[mask]).mean()

    report = check.policy_loss(loss)
    assert report
    assert "half precision, a ratio of 98,716 (ask for it with half=True)" in report.left_out
    report = check.policy_loss(loss, half=True)
    assert report.causes == ("the ratio overflows in half precision",)
    assert math.exp(11.5) == pytest.approx(98716, abs=1)
    assert check.policy_loss(widened(loss), half=True)


@pytest.mark.parametrize("key", ["ppo", "cispo"])
def test_jax(key):
    jnp = jax.numpy

    def loss(logs, old, a, mask):
        ratio = jnp.exp(jnp.where(mask, logs - old, 0))
        a, logs = jnp.where(mask, a, 0), jnp.where(mask, logs, 0)
        found = jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
        if key == "cispo":
            found = jax.lax.stop_gradient(jnp.minimum(ratio, 5)) * a * logs
        return -found.sum(where=mask) / mask.sum()

    report = check.policy_loss(loss, key, library="jax")
    assert report, report
    report = check.policy_loss(lambda *x: -loss(*x), key, library="jax")
    (cause,) = report.causes
    assert cause.startswith("the sign is that of an objective")
    undetached = check.policy_loss(loss, key, library="jax", constants=True)
    assert "the advantages are not constants" in "".join(undetached.causes)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: check.value_loss(3), TypeError, "must be one, got 3"),
        (lambda: check.step(3), TypeError, "must be one, got 3"),
        (lambda: check.kl(3, use="loss"), TypeError, "must be one, got 3"),
        (lambda: check.value_loss(max, 0), ValueError, "clip_range must be above 0, got 0"),
        (lambda: check.kl(max, "k4"), ValueError, "estimator must be one of k1, k2, k3, exact"),
        (lambda: check.kl(max, use="x"), ValueError, "use must be one of value, loss, got 'x'"),
        (lambda: check.advantages(max, gamma=2), ValueError, "gamma must be from 0 to 1, got 2"),
        (lambda: check.advantages(max, "x"), ValueError, "algorithm must be one of"),
        (lambda: check.token_log_probs(max, 0), ValueError, "temperature must be above 0, got 0"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
