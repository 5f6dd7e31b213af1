"""Runs that go wrong, and commands that are given something wrong: nothing is lost, all is said."""

import errno
import json
import math
import os

import pytest
import torch
from filelock import FileLock
from test_sweep import CONFIGS, run_sweep

from ppo_demo import __main__ as command_line
from ppo_demo.lm.bestofn import best_of_n, best_of_n_kl
from ppo_demo.lm.corpus import prompts
from ppo_demo.lm.pretrain import POLICY, SCORER, RewardModel, RewardReport, seeded
from ppo_demo.lm.rollout import sample
from ppo_demo.lm.start import pack_start, unpack_start
from ppo_demo.lm.trainer import TrainConfig, Trainer, TrainingError, write_atomically


def chance(seed=0):
    return torch.Generator().manual_seed(seed)


def start():
    return seeded(POLICY, 0), RewardModel(seeded(SCORER, 0), 0.0, 1.0)


@pytest.fixture
def folder(tmp_path):
    """A folder for results with a start in it, so that none has to be trained."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "start-0.pt").write_bytes(pack_start(*start()))
    return tmp_path / "run"


def train(folder, *options):
    """Run the command; return what it ended with, None for success."""
    arguments = ["--batch-size", "32", "--threads", "1", "--output", str(folder), *options]
    try:
        command_line.main(["train", *arguments])
    except SystemExit as ended:
        return str(ended.code)


# --- a run that leaves the numbers ---


def test_one_reward_that_is_no_number_stops_the_run_before_it_is_learned_from():
    policy, _ = start()
    calls = []

    def spoilt(tokens):
        calls.append(1)
        found = (tokens % 3 == 0).sum(-1).float()
        if len(calls) == 2:
            found[5] = math.nan
        return found

    trainer = Trainer(TrainConfig(batch_size=32, steps=3), policy, spoilt)
    trainer.step()
    before = [p.clone() for p in trainer.policy.parameters()]
    with pytest.raises(TrainingError, match=r"^reward became nan in batch 2 of 3$"):
        trainer.step()
    assert all(map(torch.equal, before, trainer.policy.parameters()))
    assert len(trainer.history) == 1


def test_a_run_that_explodes_keeps_its_last_good_checkpoint(folder):
    assert train(folder, "--steps", "2", "--checkpoint-every", "1") is None
    good = (folder / "checkpoint.pt").read_bytes()
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    for value in state["policy"].values():
        assert not value.isnan().any()
    # The settings of a run stay; its weights are what another fault may have left.
    state["policy"]["norm.weight"].fill_(1e38)
    torch.save(state, folder / "checkpoint.pt")
    spoilt = (folder / "checkpoint.pt").read_bytes()
    ended = train(folder, "--steps", "4", "--checkpoint-every", "1", "--resume")
    assert "stopped: " in ended
    assert "in batch 3 of 4; in " in ended
    assert ended.endswith("are history.json and the last good checkpoint")
    assert (folder / "checkpoint.pt").read_bytes() == spoilt != good
    history = json.loads((folder / "history.json").read_text(), parse_constant=pytest.fail)
    assert len(history["history"]) == 2


def test_a_rate_of_ten_billion_ends_with_an_error(folder):
    ended = train(folder, "--steps", "3", "--learning-rate", "1e10")
    assert "became" in ended
    assert "in batch 1 of 3" in ended or "in batch 2 of 3" in ended
    assert not (folder / "checkpoint.pt").exists()
    json.loads((folder / "history.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--kl-weight", "inf", "--kl-weight must be finite, got inf"),
        ("--entropy-weight", "inf", "--entropy-weight must be finite, got inf"),
        ("--value-weight", "inf", "--value-weight must be finite, got inf"),
        ("--value-clip", "inf", "--value-clip must be finite, got inf"),
        ("--learning-rate", "nan", "--learning-rate must be above 0, got nan"),
        ("--temperature", "1e9", "--temperature must be from 1e-6 to 1e6, got 1000000000.0"),
        ("--seed", str(2**64), f"--seed must be from 0 to 2**63 - 1, got {2**64}"),
        ("--seed", "-1", "--seed must be from 0 to 2**63 - 1, got -1"),
        ("--threads", "0", "--threads must be at least 1, got 0"),
        ("--clip-range", "nan", "--clip-range must be above 0, got nan"),
    ],
)
def test_settings_out_of_range_are_refused_as_the_user_wrote_them(folder, option, value, message):
    assert message in train(folder, option, value)
    assert not (folder / "history.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["effects", "--seeds", "0"], "error: --seeds must be at least 1, got 0"),
        (["effects", "--workers", "0"], "error: --workers must be at least 1, got 0"),
        (["sweep", "--workers", "0"], "error: --workers must be at least 1, got 0"),
        (["sweep", "--tries", "0"], "error: --tries must be at least 1, got 0"),
    ],
)
def test_numbers_of_other_commands_are_checked_before_anything_starts(
    tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"^{message}$"):
        command_line.main(arguments)
    assert list(tmp_path.iterdir()) == []


def test_padding_is_never_drawn():
    policy, _ = start()
    for temperature in (1e-6, 1e6):
        g = chance()
        written = sample(policy, prompts(64, g), g, max_tokens=14, temperature=temperature)
        assert (written.tokens[:, 1:][written.mask] != 0).all()
        assert written.log_probs.isfinite().all()
        assert written.entropies.isfinite().all()
    with pytest.raises(ValueError, match="temperature must be from 1e-6 to 1e6, got 1000000000"):
        sample(policy, prompts(1, g), g, max_tokens=2, temperature=1e9)


# --- best of n ---


def unscored(tokens):
    return torch.full((len(tokens),), math.nan)


def test_best_of_n_never_chooses_what_has_no_score():
    policy, _ = start()
    seen = []

    def score(tokens):
        found = tokens.sum(-1).float()
        found[1::2] = math.nan
        found[4:8] = torch.tensor([math.nan, -math.inf, math.nan, -math.inf])
        seen[:] = [tokens]
        return found

    chosen = best_of_n(policy, score, prompts(3, chance()), 4, chance()).tokens
    first, third = seen[0][:4:2], seen[0][8::2]
    for row, best in ((0, first), (2, third)):
        assert torch.equal(chosen[row], best[best.sum(-1).argmax()])
    assert torch.equal(chosen[1], seen[0][5])  # −∞ is a score
    with pytest.raises(ValueError, match="score must be a number for one completion of each"):
        best_of_n(
            policy, lambda t: torch.full((len(t),), math.nan), prompts(2, chance()), 4, chance()
        )


def test_more_than_the_samples_has_no_best():
    policy, model = start()
    with pytest.raises(ValueError, match="sizes must be from 1 to samples=8, got 9"):
        best_of_n_kl(policy, model, prompts(1, chance()), [2, 9], chance(), samples=8)
    with pytest.raises(ValueError, match="score must be a number for every completion"):
        best_of_n_kl(policy, unscored, prompts(1, chance()), [2], chance(), samples=8)


# --- files ---


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere"])
def test_a_folder_that_cannot_be_is_refused_before_anything_trains(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(command_line, "supervised_start", lambda _: pytest.fail("trained"))
    assert "error: " in train(place)
    assert place in train(place)
    assert (tmp_path / "file").read_text() == "mine"


def test_two_runs_cannot_share_a_folder(folder):
    with FileLock(folder / ".lock"):
        assert train(folder, "--steps", "1") == f"error: another run is writing into {folder}"
    assert train(folder, "--steps", "1") is None


@pytest.mark.parametrize("content", [b"", b"nonsense", "foreign"])
def test_a_checkpoint_that_is_none_is_named(folder, content):
    checkpoint = folder / "checkpoint.pt"
    if content == "foreign":
        torch.save({"weights": torch.ones(2)}, checkpoint)
    else:
        checkpoint.write_bytes(content)
    before = checkpoint.read_bytes()
    ended = train(folder, "--resume")
    assert "error: " in ended
    assert str(checkpoint) in ended
    assert checkpoint.read_bytes() == before


def test_a_broken_start_is_named_and_made_again(folder, monkeypatch, capsys):
    path = folder / "start-0.pt"
    path.write_bytes(path.read_bytes()[:1000])
    policy, model = start()
    monkeypatch.setattr(command_line, "supervised_start", lambda _: policy)
    report = RewardReport(accuracy=0.9, correlation=0.8)
    monkeypatch.setattr(command_line, "train_reward_model", lambda *_: (model, report))
    assert train(folder, "--steps", "1") is None
    assert f"{path} cannot be read" in capsys.readouterr().out
    assert torch.equal(unpack_start(path.read_bytes())[0].token.weight, policy.token.weight)


def test_fewer_steps_than_were_done(folder):
    assert train(folder, "--steps", "2") is None
    ended = train(folder, "--steps", "1", "--resume")
    assert "--steps must be at least the 2 that" in ended
    assert train(folder, "--steps", "2", "--resume") is None


def test_a_full_disk_ends_in_a_message_and_leaves_the_old_file(folder, monkeypatch):
    assert train(folder, "--steps", "1") is None
    before = (folder / "checkpoint.pt").read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    ended = train(folder, "--steps", "2", "--resume")
    assert ended == f"error: No space left on device: {folder / 'checkpoint.pt'}"
    assert (folder / "checkpoint.pt").read_bytes() == before
    assert not list(folder.glob("*.part"))
    with pytest.raises(OSError, match="No space"):
        write_atomically(folder / "new", b"x")
    assert not list(folder.glob("new*"))


@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_a_kept_result_that_is_not_the_runs_own_is_made_again(tmp_path, damage):
    records, _ = run_sweep(tmp_path, CONFIGS[:2], backend="sequential")
    one, other = (
        next(
            p for p in tmp_path.glob("*.json") if json.loads(p.read_text())["config"] == r["config"]
        )
        for r in records
    )
    one.write_bytes(one.read_bytes()[:50] if damage == "cut" else other.read_bytes())
    again, told = run_sweep(tmp_path, CONFIGS[:2], backend="sequential")
    assert [r["curves"] for r in again] == [r["curves"] for r in records]
    assert any(f"{one} is broken or of other settings" in line for line in told)
