"""The small RLHF system: corpus, sampler, packing, trainer, command line."""

import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from ppo_demo import __main__ as command_line
from ppo_demo.algorithms import ALGORITHMS
from ppo_demo.divergences import best_of_n_kl_bound
from ppo_demo.lm import corpus, effects
from ppo_demo.lm import trainer as trainer_module
from ppo_demo.lm.bestofn import best_of_n, best_of_n_kl, rejection_fine_tuning
from ppo_demo.lm.corpus import (
    COMPLETION_LENGTH,
    END,
    MAX_LENGTH,
    PAD,
    PROMPT_LENGTH,
    VOCABULARY,
    all_prompts,
    decode,
    encode,
    faults,
    gold_reward,
    prompts,
    rule_reward,
    sentences,
)
from ppo_demo.lm.pretrain import (
    POLICY,
    SCORER,
    RewardModel,
    RewardReport,
    preference_loss,
    seeded,
    supervised_start,
    train_reward_model,
)
from ppo_demo.lm.rollout import sample
from ppo_demo.lm.start import pack_start
from ppo_demo.lm.step import next_token_log_probs
from ppo_demo.lm.trainer import TrainConfig, Trainer, train, write_atomically
from ppo_demo.surrogates import Clip, DualClip

# --- corpus ---------------------------------------------------------------------------------------


def padded(*texts):
    rows = torch.full((len(texts), MAX_LENGTH), PAD)
    for row, text in zip(rows, texts, strict=True):
        ids = encode(text)
        row[: len(ids)] = ids
    return rows


GOLD = {
    "the boss was red <end>": 0,
    "the boss was great <end>": 1,
    "the boss was great but fun <end>": 2,
    "the boss was great and great <end>": 0,  # one praise, one repetition
    "the boss was great and fun and superb <end>": 1,  # two count, the third costs
    "the boss was very bad <end>": -1,
    "the boss was bad but great <end>": 0,
    "the boss was great": 0,  # no end
    "the boss was very very great <end>": 0,  # a fault of grammar
    "the boss great <end>": 0,
    "the boss <end>": -1,
    "the boss was great fun <end>": 1,
}
RIGHT = {"the boss was great but fun <end>", "the boss was great and fun and superb <end>"}


def test_gold_reward_by_hand():
    assert gold_reward(padded(*GOLD)).tolist() == list(GOLD.values())


def test_rule_by_hand():
    assert rule_reward(padded(*GOLD)).tolist() == [float(text in RIGHT) for text in GOLD]


def test_corpus_is_grammatical_and_fits():
    reviews = sentences(2000, torch.Generator().manual_seed(0))
    assert (faults(reviews) == 0).all()
    assert corpus.ended(reviews).all()
    assert len(VOCABULARY) == 36
    lengths = (reviews != PAD).sum(-1)
    assert lengths.min() == 5
    assert lengths.max() <= MAX_LENGTH
    assert -0.4 < gold_reward(reviews).mean() < 0
    text = decode(reviews[0])
    assert decode(encode(text)) == text


def test_unknown_word_is_refused():
    with pytest.raises(ValueError, match="words of the vocabulary only, got 'castle'"):
        encode("the castle was great")


# --- sampling -------------------------------------------------------------------------------------


def chance(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_agree_on_log_probs_values_and_entropies(temperature):
    model = seeded(POLICY, 0)
    g = chance()
    found = sample(model, prompts(64, g), g, max_tokens=COMPLETION_LENGTH, temperature=temperature)
    logits, values = model(found.tokens)
    logs = next_token_log_probs(logits / temperature, found.tokens)
    mask = found.mask
    assert ((logs - found.log_probs)[mask].abs() < 1e-5).all()
    assert ((values[:, :-1] - found.values)[mask].abs() < 1e-5).all()
    spread = torch.distributions.Categorical(logits=logits[:, :-1] / temperature).entropy()
    assert ((spread - found.entropies)[mask].abs() < 1e-5).all()
    assert (found.log_probs[~mask] == 0).all()


def test_completions_end_once_and_are_padded():
    model = seeded(POLICY, 1)
    with torch.no_grad():
        model.offset[END] = 2.0
    g = chance()
    found = sample(model, prompts(300, g), g, max_tokens=COMPLETION_LENGTH)
    written = found.tokens[:, PROMPT_LENGTH:]
    ends = written == END
    assert (ends.sum(-1) <= 1).all()
    after = ends.cumsum(-1) - ends.int()
    assert ((written == PAD) == (after > 0)).all()
    assert (found.mask[:, PROMPT_LENGTH - 1 :] == (after == 0)).all()
    assert not found.mask[:, : PROMPT_LENGTH - 1].any()
    assert found.lengths.min() == 1
    assert found.lengths.max() == COMPLETION_LENGTH


def test_words_are_drawn_as_likely_as_the_policy_says():
    model = seeded(POLICY, 2)
    g = chance()
    asked = prompts(1, g).repeat(20_000, 1)
    drawn = sample(model, asked, g, max_tokens=1, end=None).tokens[:, PROMPT_LENGTH]
    expected = model(asked[:1])[0][0, -1].softmax(-1).detach()
    counts = torch.bincount(drawn, minlength=len(VOCABULARY))
    chi = ((counts - 20_000 * expected)[1:] ** 2 / (20_000 * expected[1:])).sum()
    assert counts[PAD] == 0
    assert chi < 75  # of 34 degrees of freedom: exceeded once in ten thousand


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"max_tokens": 99}, "max_tokens must be from 1 to 14, got 99"),
        ({"max_tokens": 0}, "max_tokens must be from 1 to 14, got 0"),
    ],
)
def test_bad_sampling_is_refused(options, message):
    arguments = {"max_tokens": 2, **options}
    with pytest.raises(ValueError, match=message):
        sample(seeded(POLICY, 0), prompts(1, chance()), chance(), **arguments)


def test_best_of_n_keeps_the_best_and_fine_tuning_learns_from_it():
    model = seeded(POLICY, 0)

    def score(tokens):
        return (tokens == encode("great")).sum(-1).float()

    asked = prompts(64, chance())
    one = score(best_of_n(model, score, asked, 1, chance(1)).tokens).mean()
    best = best_of_n(model, score, asked, 16, chance(1))
    assert score(best.tokens).mean() > one + 1
    assert (best.tokens[:, :PROMPT_LENGTH] == asked).all()
    tuned = rejection_fine_tuning(model, best, chance(), epochs=4)
    assert score(best_of_n(tuned, score, asked, 1, chance(1)).tokens).mean() > one
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        best_of_n(model, score, asked, 0, chance())


def test_kl_of_best_of_n_where_it_is_known():
    model, sizes = seeded(POLICY, 0), (1, 4, 16)
    weights = torch.rand(20, generator=chance(5))

    def score(tokens):  # hardly ever the same for two texts
        return (tokens * weights[: tokens.shape[1]]).sum(-1)

    # An untrained policy never writes a text twice: the limit of a continuous reward.
    found = best_of_n_kl(model, score, all_prompts()[:2], sizes, chance())
    bounds = best_of_n_kl_bound(np.asarray(sizes, dtype=float))
    np.testing.assert_allclose(found, bounds, rtol=0.02, atol=1e-9)
    # A policy that always writes the same has nothing to choose from.
    model.offset[encode("<end>")] = 40.0
    found = best_of_n_kl(model, score, all_prompts()[:2], sizes, chance())
    np.testing.assert_allclose(found, 0, atol=1e-6)


@pytest.fixture(scope="module")
def untrained():
    """A policy that writes completions of many lengths, and a reward with some spread."""
    model = seeded(POLICY, 0)
    with torch.no_grad():
        model.offset[END] = 1.5
    return model, lambda tokens: (tokens % 3 == 0).sum(-1).float()


# --- trainer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "trpo"}, "algorithm must be one of reinforce, .*, got 'trpo'"),
        ({"batch_size": 100}, "group_size must be a divisor of batch_size=100, got 8"),
        ({"minibatches": 3}, "minibatches must be a divisor of batch_size=128, got 3"),
        ({"kl_weight": -0.1}, "kl_weight must be at least 0, got -0.1"),
        ({"algorithm": "rloo", "group_size": 1}, "group_size must be at least 2 for RLOO, got 1"),
        ({"algorithm": "maxrl"}, r"reward must be 'rule' \(0 or 1\) for MaxRL, got 'model'"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0, got 0.0"),
        ({"learning_rate": math.nan}, "learning_rate must be above 0, got nan"),
        ({"learning_rate": math.inf}, "learning_rate must be finite, got inf"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"lam": 1.1}, "lam must be from 0 to 1, got 1.1"),
        ({"target_kl": 0.0}, "target_kl must be above 0, got 0.0"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"reward": "human"}, "reward must be one of model, rule, got 'human'"),
        (
            {"algorithm": "cispo", "clip_range": 0.2},
            "clip_range must be left out for CISPO, which has none",
        ),
    ],
)
def test_bad_settings_name_the_field(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes)


def test_clip_range_of_the_settings_is_where_the_row_has_one():
    def clip(**settings):
        return TrainConfig(**settings).row.clip

    assert clip(algorithm="dapo") == Clip(0.2, 0.28)
    assert clip(algorithm="dapo", clip_range=0.1) == Clip(0.1, 0.28)
    assert clip(algorithm="dapo", clip_range_high=0.4) == Clip(0.2, 0.4)
    assert clip(algorithm="ppo", clip_range=0.1) == Clip(0.1)
    mine = replace(ALGORITHMS["grpo"], clip=DualClip(0.2, dual_clip=3.0))
    assert clip(algorithm=mine, clip_range=0.1) == DualClip(0.1, dual_clip=3.0)
    with pytest.raises(ValueError, match="dual_clip must be above"):
        TrainConfig(algorithm=mine, clip_range_high=2.5)


def test_a_row_of_your_own_is_what_trains_and_what_is_kept(untrained, tmp_path):
    mine = replace(ALGORITHMS["ppo"], name="mine", clip=Clip(1e-6))
    config = TrainConfig(algorithm=mine, steps=1, batch_size=32)
    trainer = train(config, *untrained)
    assert trainer.history[0]["clip_fraction"] > 0.2
    wide = train(replace(config, clip_range=9.0), *untrained)
    assert wide.history[0]["clip_fraction"] == 0
    trainer.save(tmp_path / "mine.pt")
    again = Trainer(config, *untrained)
    again.load(tmp_path / "mine.pt")
    assert again.history == trainer.history
    for other in (TrainConfig(steps=1, batch_size=32), replace(config, clip_range=0.1)):
        with pytest.raises(ValueError, match="to go on from"):
            Trainer(other, *untrained).load(tmp_path / "mine.pt")


@pytest.mark.parametrize(("key", "shape"), [("gspo", (16, 1)), ("dapo", (16, 14 + 1))])
def test_trainer_counts_what_its_loss_has_clipped(untrained, monkeypatch, key, shape):
    seen = []
    count = trainer_module.clip_fraction
    monkeypatch.setattr(
        trainer_module, "clip_fraction", lambda *found: seen.append(found) or count(*found)
    )
    row = ALGORITHMS[key]
    metrics = Trainer(TrainConfig(algorithm=row, batch_size=32), *untrained).step()
    assert {tuple(ratio.shape) for _, ratio, _, _ in seen} == {shape}
    shares = []
    for clip, ratio, advantage, mask in seen:
        assert clip == row.clip
        above, below = ratio > 1 + clip.clip_range_high, ratio < 1 - clip.clip_range
        gone = (above & (advantage > 0)) | (below & (advantage < 0))
        shares.append((gone & mask).sum() / mask.sum())
    assert metrics["clip_fraction"] == pytest.approx(torch.stack(shares).mean().item())
    assert metrics["clip_fraction"] > 0


def test_same_seed_gives_the_same_history_to_the_bit(untrained):
    config = TrainConfig(steps=3, batch_size=32, seed=4)
    one, two = (train(config, *untrained).history for _ in range(2))
    assert one == two
    assert train(TrainConfig(steps=3, batch_size=32, seed=5), *untrained).history != one


def test_history_has_the_standard_metrics(untrained):
    (metrics,) = train(TrainConfig(steps=1, batch_size=32), *untrained).history
    names = "reward gold kl entropy clip_fraction approx_kl explained_variance length grad_norm"
    assert set(names.split()) < set(metrics)
    assert metrics["kl"] == pytest.approx(0, abs=1e-4)  # the policy is the reference at first
    assert metrics["gradient_steps"] == 8


def test_epochs_end_early_on_approximate_kl(untrained):
    config = TrainConfig(steps=1, batch_size=32, learning_rate=0.05, target_kl=1e-3)
    assert train(config, *untrained).history[0]["gradient_steps"] == 2


def test_adaptive_kl_weight_moves_towards_its_target(untrained):
    config = TrainConfig(steps=4, batch_size=32, adaptive_kl_target=1e-6, adaptive_kl_horizon=32)
    weights = [metrics["kl_weight"] for metrics in train(config, *untrained).history]
    assert weights[0] == 0.05
    assert weights[-1] > weights[0]


def test_kl_in_the_reward_is_paid_where_it_arises(untrained):
    """With no score, no value head and λ = 1, an advantage is minus β times the KL to come."""
    policy, _ = untrained
    config = TrainConfig(lam=1.0, whiten_advantages=False, kl_weight=0.5, batch_size=16)
    trainer = Trainer(config, policy, lambda tokens: torch.zeros(len(tokens)))
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            parameter.mul_(1.1)
        trainer.policy.value_head.weight.zero_()
        trainer.policy.value_head.bias.zero_()
    batch, metrics = trainer.rollout()
    gap = torch.where(batch.mask, batch.old_log_probs - batch.ref_log_probs, 0.0)
    to_come = gap.flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(
        batch.advantages[batch.mask], -0.5 * to_come[batch.mask], rtol=1e-4, atol=1e-5
    )
    assert metrics["kl"] == pytest.approx(gap.sum(-1).mean().item(), rel=1e-4)


def test_preference_loss_is_bradley_terry():
    chosen, rejected = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(2))) / 2
    assert preference_loss(chosen, rejected).item() == pytest.approx(expected)


def test_resumed_run_has_the_same_history(untrained, tmp_path):
    whole = train(TrainConfig(steps=4, batch_size=32), *untrained).history
    first = Trainer(TrainConfig(steps=2, batch_size=32), *untrained)
    for _ in first.run():
        pass
    first.save(tmp_path / "checkpoint.pt")
    second = Trainer(TrainConfig(steps=4, batch_size=32), *untrained)
    second.load(tmp_path / "checkpoint.pt")
    for _ in second.run():
        pass
    assert second.history == whole
    other = Trainer(TrainConfig(steps=4, batch_size=32, learning_rate=0.1), *untrained)
    with pytest.raises(ValueError, match=r"learning_rate must be 0\.001 to go on from"):
        other.load(tmp_path / "checkpoint.pt")


def test_a_write_that_is_cut_off_leaves_the_old_file(tmp_path):
    target = tmp_path / "file"
    write_atomically(target, b"old")
    code = f"""
import os
from pathlib import Path
from ppo_demo.lm import trainer
os.fsync = lambda _: os.kill(os.getpid(), 9)
trainer.write_atomically(Path({str(target)!r}), b"new" * 1000)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert target.read_bytes() == b"old"
    write_atomically(target, b"newer")
    assert target.read_bytes() == b"newer"


# --- the whole ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start():
    policy = supervised_start(0)
    return policy, *train_reward_model(policy, 0)


@pytest.mark.slow
def test_supervised_start_writes_like_people_and_reward_model_ranks_like_gold(start):
    policy, _, report = start
    g = chance(7)
    written = sample(policy, prompts(512, g), g, max_tokens=COMPLETION_LENGTH).tokens
    assert (faults(written) > 0).float().mean() < 0.15
    assert gold_reward(written).mean() == pytest.approx(-0.2, abs=0.3)
    assert report.accuracy > 0.9
    assert report.correlation > 0.8


@pytest.mark.slow
def test_ppo_learns_and_without_kl_it_over_optimises(start):
    policy, reward_model, _ = start
    held = train(TrainConfig(), policy, reward_model).history
    free = train(TrainConfig(kl_weight=0.0), policy, reward_model).history
    late = {
        name: [np.mean([m[name] for m in run[-5:]]) for run in (held, free)]
        for name in ("reward", "gold", "kl")
    }
    assert held[0]["gold"] < 0.2
    assert late["gold"][0] > 0.9
    assert late["reward"][1] > late["reward"][0] - 0.1  # the proxy is as high or higher …
    assert late["gold"][1] < late["gold"][0] - 1  # … and what it stands for lower
    assert late["kl"][1] > 2 * late["kl"][0]


@pytest.mark.slow
@pytest.mark.parametrize("key", ALGORITHMS)
def test_every_row_learns_the_rule(start, key):
    policy, reward_model, _ = start
    # Without a ratio, nothing corrects for steps off-policy: one pass, as many steps.
    passes = {"epochs": 1, "minibatches": 8} if ALGORITHMS[key].ratio == "none" else {}
    config = TrainConfig(algorithm=key, reward="rule", steps=40, **passes)
    history = train(config, policy, reward_model).history
    assert history[0]["rule"] < 0.2
    assert np.mean([m["rule"] for m in history[-5:]]) > 0.75


# --- the study over seeds -------------------------------------------------------------------------


def test_stored_study_was_made_by_the_present_code():
    record = json.loads(effects.STORED.read_text(encoding="utf-8"))
    assert record["sources"] == effects.sources(record["studies"]), (
        "run `python -m ppo_demo effects --save`"
    )
    assert len(record["studies"]) == 5


def test_what_the_page_says_of_the_study_holds():
    studies = effects.load()
    assert list(effects.claims(studies).values()) == [5, 3, 5, 4, 4, 5, 5, 5, 5, 5]
    gold = {label: np.array([s[label]["gold"] for s in studies]) for label in studies[0]}
    ppo, begun = gold["PPO, lr 1e-3, β 0.05"], gold["best of 1"]
    free, plain = gold["PPO, lr 1e-3, β 0"], gold["plain gradient, lr 1e-3"]
    assert sorted(free - begun)[2] < -4
    assert sorted(free - begun)[3] == pytest.approx(-2.2, abs=0.3)
    assert free.max() > begun.max() + 1
    assert ((plain > begun) & (plain > ppo - 0.6)).sum() == 2
    assert gold["unclipped ratio, lr 1e-3"].mean() == pytest.approx(ppo.mean(), abs=0.15)
    fast = gold["PPO, lr 1e-2, β 0.05"]
    assert (fast > begun + 0.8).all()
    for key in ALGORITHMS:
        label = f"rule: {ALGORITHMS[key].name}"
        assert all(s[label]["rule"] > 0.8 for s in studies), label
        far = np.mean([s[label]["kl"] for s in studies])
        low, high = (9, 19) if ALGORITHMS[key].kl == "none" else (5, 7)
        assert low < far < high, label
    for n in effects.SIZES:  # measured: at its bound, less what equal texts take away
        bound = float(best_of_n_kl_bound(float(n)))
        assert all(
            0.98 * bound - 1e-9 <= s[f"best of {n}"]["kl"] < 1.005 * bound + 1e-9 for s in studies
        )
    held = np.mean([s["PPO, lr 1e-3, β 0.05"]["kl"] for s in studies])
    assert np.mean([s["best of 64"]["kl"] for s in studies]) < 0.55 * held
    assert gold["best of 64"].mean() == pytest.approx(ppo.mean(), abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("label", ["PPO, lr 1e-3, β 0", "rule: GRPO"])
def test_stored_study_can_be_repeated(start, label):
    """Within what another processor's rounding may do to a chaotic run: the same effect."""
    policy, reward_model, _ = start
    run = next((r for r in effects.RUNS if r.label == label), effects.by_rule("grpo"))
    found, stored = effects.measure(run, 0, policy, reward_model), effects.load()[0][label]
    assert found["reward"] == pytest.approx(stored["reward"], abs=0.5)
    assert found["rule"] == pytest.approx(stored["rule"], abs=0.2)
    assert (found["gold"] < -1) == (stored["gold"] < -1)


def command(*arguments):
    return [sys.executable, "-m", "ppo_demo", "train", *arguments]


def wait_until(condition, run):
    """Wait for a running command to come so far; a minute at most."""
    for _ in range(1200):
        if condition() or run.poll() is not None:
            break
        time.sleep(0.05)
    assert run.poll() is None, "the command ended before it was stopped"


def test_command_line_keeps_the_start(tmp_path, monkeypatch, capsys):
    policy, model = seeded(POLICY, 4), RewardModel(seeded(SCORER, 4), 0.25, 2.0)
    monkeypatch.setattr(command_line, "supervised_start", lambda _: policy)
    report = RewardReport(accuracy=0.9, correlation=0.8)
    monkeypatch.setattr(command_line, "train_reward_model", lambda *_: (model, report))
    path = tmp_path / "deep" / "start-4.pt"
    assert command_line.start(4, path) == (policy, model)
    assert "ranks 90% of unseen pairs" in capsys.readouterr().out
    again, model_again = command_line.start(4, path)
    assert capsys.readouterr().out == ""
    tokens = prompts(5, chance())
    assert torch.equal(again(tokens)[0], policy(tokens)[0])
    assert torch.equal(model_again(tokens), model(tokens))


@pytest.mark.slow
def test_command_line_stops_resumes_and_gives_the_same_history(tmp_path, start):
    options = ["--algorithm", "grpo", "--steps", "24", "--threads", "1", "--checkpoint-every", "4"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):  # as an earlier run leaves it there
        write_atomically(folder / "start-0.pt", pack_start(start[0], start[1]))
    subprocess.run(command(*options, "--output", str(whole)), check=True, capture_output=True)

    # Killed outright once a checkpoint is there, then interrupted, then run to the end.
    run = subprocess.Popen(command(*options, "--output", str(parts)), stdout=subprocess.DEVNULL)
    checkpoint = parts / "checkpoint.pt"
    wait_until(checkpoint.exists, run)
    run.kill()
    run.wait()
    killed_at = checkpoint.stat().st_mtime_ns
    resume = command(*options, "--output", str(parts), "--resume")
    run = subprocess.Popen(resume, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: checkpoint.stat().st_mtime_ns != killed_at, run)
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate()
    assert run.returncode == 0
    assert "stopped after" in out
    assert "history.json, curves.svg and checkpoint.pt are in" in out
    subprocess.run(resume, check=True, capture_output=True)

    one, two = (json.loads((p / "history.json").read_text()) for p in (whole, parts))
    assert one == two
    assert len(one["history"]) == 24
    assert "<svg" in (whole / "curves.svg").read_text()
    again = subprocess.run(
        command(*options, "--output", str(whole)), capture_output=True, text=True
    )
    assert again.returncode != 0
    assert "holds a run already" in again.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--algorithm", "nonesuch"], "algorithm must be one of"),
        (["--algorithm", "rloo", "--group-size", "1"], "--group-size must be at least 2 for RLOO"),
        (["--resume", "--threads", "1"], "--resume needs a checkpoint"),
        (["--learning-rat", "1"], "learning-rat"),
    ],
)
def test_command_line_errors_name_the_field(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        command_line.main(["train", *options, "--output", str(tmp_path / "run")])
    assert caught.value.code not in (0, None)
    out, err = capsys.readouterr()
    assert message in f"{out}{err}{caught.value}"
