"""`python -m ppo_demo …`: train a small language model, repeat the studies, check a loss."""

import io
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import signature
from json import dumps as to_json
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import torch
import tyro
from filelock import FileLock, Timeout
from tqdm import tqdm

from ppo_demo import check
from ppo_demo._checks import at_least, require, whole
from ppo_demo.figures import COLORS, new_figure, style
from ppo_demo.lm import effects, results
from ppo_demo.lm import sweep as sweeping
from ppo_demo.lm.corpus import COMPLETION_LENGTH, decode, prompts, rule_reward
from ppo_demo.lm.model import PolicyValueModel
from ppo_demo.lm.pretrain import (
    POLICY,
    RewardModel,
    seeded,
    supervised_start,
    train_reward_model,
)
from ppo_demo.lm.rollout import sample
from ppo_demo.lm.start import pack_start, unpack_start
from ppo_demo.lm.trainer import (
    TrainConfig,
    Trainer,
    TrainingError,
    write_atomically,
    write_history,
)
from ppo_demo.losses import Algorithm

COMMAND_LINE = tyro.constructors.ConstructorRegistry()


@COMMAND_LINE.primitive_rule
def by_name(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[str] | None:
    """Take an algorithm by its name: a row of one's own is made in Python."""
    if info.type != str | Algorithm:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME",
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda name: [name],
    )


CURVES = (
    ("reward", "ppo", "reward model, in deviations of the start"),
    ("gold", "mark", "gold reward"),
    ("kl", "plain", "KL from the reference, nats a completion"),
)


@dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """Train a policy: supervised start, reward model, then reinforcement learning.

    Writes history.json, curves.svg and checkpoint.pt into a folder. Ctrl-C keeps what there is.

    Attributes
    ----------
    config : TrainConfig
        Settings of the training.
    output : Path
        Folder for the results.
    resume : bool
        Go on from the checkpoint in the folder.
    checkpoint_every : int
        Batches between checkpoints.
    show_every : int
        Batches between lines of samples.
    threads : int
        Threads of PyTorch; the same number gives the same history to the bit.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    output: Path = Path("run")
    resume: bool = False
    checkpoint_every: int = 10
    show_every: int = 20
    threads: int = 2

    def __post_init__(self) -> None:
        counts = {n: getattr(self, n) for n in ("checkpoint_every", "show_every", "threads")}
        at_least(1, **counts)


def start(seed: int, path: Path) -> tuple[PolicyValueModel, RewardModel]:
    """Return the supervised start and the reward model; from `path`, if they are there."""
    if path.exists():
        try:
            return unpack_start(path.read_bytes())
        except Exception as error:  # of many kinds, by what is broken
            print(f"{path} cannot be read ({type(error).__name__}): it is made again", flush=True)
    print("supervised start …", flush=True)
    policy = supervised_start(seed)
    print("reward model …", flush=True)
    model, report = train_reward_model(policy, seed)
    print(f"  ranks {report.accuracy:.0%} of unseen pairs as the gold reward does")
    write_atomically(path, pack_start(policy, model))
    return policy, model


def draw(history: list[dict[str, float]], path: Path) -> None:
    """Write the curves of a run as SVG."""
    with style():
        figure = new_figure(170 * len(CURVES))
        figure.set_facecolor("white")
        for place, (key, color, label) in enumerate(CURVES):
            axes = figure.add_subplot(len(CURVES), 1, place + 1)
            axes.plot([metrics[key] for metrics in history], color=COLORS[color])
            axes.set_title(label)
        axes.set_xlabel("batch")
        figure.tight_layout()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None})
    write_atomically(path, buffer.getvalue())


def train(arguments: TrainArguments) -> None:
    """Run `python -m ppo_demo train`."""
    with own(arguments.output):
        _train(arguments)


def _train(arguments: TrainArguments) -> None:
    torch.set_num_threads(arguments.threads)
    config, folder = arguments.config, arguments.output
    checkpoint = folder / "checkpoint.pt"
    if arguments.resume and not checkpoint.exists():
        raise SystemExit(f"--resume needs a checkpoint, and there is none in {folder}")
    if not arguments.resume and checkpoint.exists():
        raise SystemExit(f"{folder} holds a run already: --resume it, or choose another --output")
    if arguments.resume:  # before anything is trained for it
        Trainer(config, seeded(POLICY, 0), rule_reward).load(checkpoint)
    trainer = Trainer(config, *start(config.seed, folder / f"start-{config.seed}.pt"))
    if arguments.resume:
        trainer.load(checkpoint)
    done, failure = len(trainer.history), None
    with (
        finish_on_interrupt() as interrupted,
        tqdm(total=config.steps, initial=done, unit="batch", dynamic_ncols=True) as bar,
    ):
        batches = trainer.run()
        while True:
            try:
                metrics = next(batches)
            except StopIteration:
                break
            except TrainingError as error:  # the policy is spoilt: its last checkpoint stays
                failure = error
                break
            bar.update()
            bar.set_postfix({k: f"{metrics[k]:.2f}" for k in ("reward", "gold", "kl")})
            done = len(trainer.history)
            if done % arguments.show_every == 0 or done == config.steps:
                bar.write(f"  {done}: {sample_line(trainer)}")
            if done % arguments.checkpoint_every == 0:
                trainer.save(checkpoint)
            if interrupted:
                bar.write(f"stopped after {done} batches; --resume goes on")
                break
    if failure is None:
        trainer.save(checkpoint)
    write_history(folder / "history.json", config, trainer.history)
    if trainer.history:
        draw(trainer.history, folder / "curves.svg")
    if failure is not None:
        kept = "the last good checkpoint" if checkpoint.exists() else "no checkpoint yet"
        raise SystemExit(f"stopped: {failure}; in {folder} are history.json and {kept}")
    print(f"history.json, curves.svg and checkpoint.pt are in {folder}")


@contextmanager
def own(folder: Path) -> Iterator[None]:
    """Make a folder for results, if it is not there, and keep other runs out of it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        raise SystemExit(f"error: another run is writing into {folder}") from None
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise SystemExit(
            f"error: the folder for the results must be one that can be written, got {folder} "
            f"({error.strerror})"
        ) from None


@contextmanager
def finish_on_interrupt() -> Iterator[list[int]]:
    """Collect a Ctrl-C, so that a batch under way is finished; the second one breaks off.

    A checkpoint in the middle of a batch would go on differently.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            signal.default_int_handler(number, frame)
        received.append(number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


def sample_line(trainer: Trainer) -> str:
    """Return one review of the present policy; the run's own chance is left alone."""
    generator = torch.Generator().manual_seed(len(trainer.history))
    asked = prompts(1, generator)
    written = sample(trainer.policy, asked, generator, max_tokens=COMPLETION_LENGTH)
    return decode(written.tokens[0])


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and do what it says."""
    commands: dict[str, Callable[..., Any]] = {
        "train": train_command,
        "effects": effects_command,
        "sweep": sweep_command,
        "check": check_command,
    }
    try:
        with COMMAND_LINE:
            tyro.extras.subcommand_cli_from_dict(
                commands, args=arguments, prog="python -m ppo_demo"
            )
    except ValueError as error:
        # As the user wrote it: --learning-rate, not learning_rate.
        shown = re.sub(
            r"^([a-z]+(?:_[a-z]+)*)(?= must be)",
            lambda m: "--" + m[1].replace("_", "-"),
            str(error),
        )
        raise SystemExit(f"error: {shown}") from None
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        raise SystemExit(f"error: {error.strerror or error}{place}") from None


def train_command(arguments: Annotated[TrainArguments, tyro.conf.arg(name="")]) -> None:
    """Train a policy: supervised start, reward model, then reinforcement learning."""
    train(arguments)


def sweep_command(
    folder: Path = Path("sweep"),
    workers: int = 2,
    scheduler: str | None = None,
    tries: int = 3,
    save: bool = False,
) -> None:
    """Train PPO over a grid of learning rates, clip ranges and KL weights.

    Finished runs are kept in a folder; the same command goes on with those that are missing.

    Parameters
    ----------
    folder : Path
        Where finished runs are kept.
    workers : int
        Processes on this machine, of one thread each.
    scheduler : str
        Address of a Dask scheduler, tcp://host:port, to run on its workers instead.
    tries : int
        How often a run is tried that fails.
    save : bool
        Keep the results in the package; the book's Lab C shows them.
    """
    whole(workers=workers, tries=tries)
    at_least(1, workers=workers, tries=tries)
    with own(folder):
        _sweep(folder, workers, scheduler, tries, save)


def _sweep(folder: Path, workers: int, scheduler: str | None, tries: int, save: bool) -> None:
    configs = sweeping.grid()
    begun = time.perf_counter()
    try:
        records = sweeping.sweep(configs, folder, workers=workers, scheduler=scheduler, tries=tries)
    except KeyboardInterrupt:
        raise SystemExit(
            f"stopped; the finished runs are in {folder}, and the same command goes on"
        ) from None
    except sweeping.SweepError as error:
        raise SystemExit(f"error: {error}") from None
    spent, seconds = time.perf_counter() - begun, sum(r["seconds"] for r in records)
    print(f"{len(records)} runs of {seconds / len(records):.1f} s each; {spent / 60:.1f} min now")
    result = results.STORED if save else folder / "sweep.json"
    sweeping.save(records, result)
    found = results.load(result)
    print("\nHighest learning rate that still learns")
    print(f"{'':>8}" + "".join(f"{f'β {weight:g}':>10}" for weight in found.kl_weights))
    for clip, row in zip(found.clip_ranges, found.highest_learning_rate(), strict=True):
        cells = (f"{rate:>10g}" if rate == rate else f"{'none':>10}" for rate in row)
        print(f"{f'ε {clip:g}':>8}" + "".join(cells))
    print(f"\nall results are in {'the package' if save else result}")


def effects_command(seeds: int = 5, workers: int = 2, save: bool = False) -> None:
    """Measure the effects that the book describes over seeds, and print them as tables.

    Parameters
    ----------
    seeds : int
        How many seeds; each takes some two minutes.
    workers : int
        Processes, of one thread each.
    save : bool
        Keep the results in the package; the book prints them.
    """
    at_least(1, seeds=seeds, workers=workers)
    spawn = get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, torch.set_num_threads, (1,)) as pool:
        tell = partial(print, flush=True)
        studies = list(pool.map(partial(effects.study, progress=tell), range(seeds)))
    if save:
        effects.save(studies)
    print("\nTraining on the reward model")
    columns = ["reward", "gold", "kl", "length"]
    print(effects.table(studies, [run.label for run in effects.RUNS], columns))
    print("\nBest-of-n by the reward model")
    print(effects.table(studies, [f"best of {n}" for n in effects.SIZES], ["reward", "gold", "kl"]))
    print("\nEvery row of the table, on the rule's reward")
    rows = [label for label in studies[0] if label.startswith("rule: ")]
    print(effects.table(studies, rows, ["rule", "gold", "kl", "length"]))
    print(f"\nSeeds of {seeds} on which it holds")
    for claim, count in effects.claims(studies).items():
        print(f"  {count}  {claim}")


@dataclass(frozen=True)
class CheckOptions:
    """What a function is checked for; each kind of check has some of these.

    Attributes
    ----------
    algorithm : str
        Row of the table to hold it against.
    clip_range : float
        Of a value loss.
    estimator, use : str
        Of a KL: k1, k2, k3 or exact; as a value or as a loss.
    gamma, lam : float
        Of advantages over time.
    temperature : float
        Of log-probabilities of tokens.
    library : {"torch", "numpy", "jax"}
        What arrays it takes.
    constants : bool
        Also ask that no gradient flows through what is constant.
    half : bool
        Also try half precision.
    """

    algorithm: str | None = None
    clip_range: float | None = None
    estimator: Literal["k1", "k2", "k3", "exact"] | None = None
    use: Literal["value", "loss"] | None = None
    gamma: float | None = None
    lam: float | None = None
    temperature: float | None = None
    library: Literal["torch", "numpy", "jax"] | None = None
    constants: bool = False
    half: bool = False


def check_command(
    function: Annotated[str, tyro.conf.Positional],
    options: Annotated[CheckOptions, tyro.conf.arg(name="")],
    kind: Literal[
        "policy_loss", "value_loss", "kl", "advantages", "token_log_probs", "step"
    ] = "policy_loss",
    json: bool = False,
) -> None:
    """Hold a function against the book's; exit status 0 if they agree, 1 if not.

    Parameters
    ----------
    function : str
        MODULE:FUNCTION; modules are looked for in the present folder first.
    options : CheckOptions
        What it is checked for.
    kind : str
        What it is: a function of `ppo_demo.check`, whose docstring says how it is called.
    json : bool
        Print the report as JSON.
    """
    given = {k: v for k, v in vars(options).items() if v is not None and v is not False}
    module, _, name = function.partition(":")
    require("function", function, module and name, "MODULE:FUNCTION")
    checks = getattr(check, kind)
    for option in given:
        known = option in signature(checks).parameters
        require(option, given[option], known, f"left out for --kind {kind}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--function must be MODULE:FUNCTION, got {function!r} ({error})"
        ) from error
    finally:
        sys.path.pop(0)
    report = checks(found, **given)
    print(to_json({"holds": bool(report), **vars(report)}, indent=1) if json else report)
    raise SystemExit(0 if report else 1)


if __name__ == "__main__":
    main()
