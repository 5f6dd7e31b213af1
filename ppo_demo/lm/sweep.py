"""Many training runs over a grid, on all cores or on a cluster: `python -m ppo_demo sweep`.

Each run is one task with one thread, so its numbers do not depend on how many run beside it, nor
on where or in what order. Finished runs are kept one by one in a folder; a sweep that was stopped
goes on with those that are missing.
"""

import hashlib
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import joblib
import numpy as np
import torch
from tqdm import tqdm

from ppo_demo.algorithms import ALGORITHMS
from ppo_demo.lm.corpus import COMPLETION_LENGTH, all_prompts, decode
from ppo_demo.lm.results import AXES, METRICS, STORED
from ppo_demo.lm.rollout import sample
from ppo_demo.lm.start import make_start, one_thread, unpack_start
from ppo_demo.lm.trainer import TrainConfig, train, write_atomically
from ppo_demo.provenance import study_digest

LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
CLIP_RANGES = (0.05, 0.1, 0.2, 0.4)
KL_WEIGHTS = (0.0, 0.01, 0.05, 0.2, 1.0)
SEEDS = (0, 1)
SAMPLES = 3
"""Reviews that a trained policy writes."""
Parallel: TypeAlias = Callable[..., Any]
Record: TypeAlias = dict[str, Any]
"""A finished run: ``config``, a digest of its ``start``, ``seconds``, ``curves``, ``samples``."""
Task: TypeAlias = Callable[[TrainConfig, bytes], Record]


_CHANCE = threading.Lock()
"""Initial weights come from PyTorch's own generator, which the threads of a process share."""


class SweepError(RuntimeError):
    """Some runs, or where they start, could not be finished, however often they were tried."""


def grid(
    learning_rates: Sequence[float] = LEARNING_RATES,
    clip_ranges: Sequence[float] = CLIP_RANGES,
    kl_weights: Sequence[float] = KL_WEIGHTS,
    seeds: Sequence[int] = SEEDS,
    **settings: Any,
) -> list[TrainConfig]:
    """Return the settings of every run of a sweep.

    Parameters
    ----------
    learning_rates, clip_ranges, kl_weights : sequence of float
        The grid: learning rate, ε and β.
    seeds : sequence of int
        Of start, reward model and training.
    **settings
        Other fields of `TrainConfig`.

    Returns
    -------
    list of TrainConfig
        Seeds change fastest.
    """
    return [
        TrainConfig(
            learning_rate=learning_rate,
            clip_range=clip_range,
            kl_weight=kl_weight,
            seed=seed,
            **settings,
        )
        for learning_rate, clip_range, kl_weight, seed in product(
            learning_rates, clip_ranges, kl_weights, seeds
        )
    ]


def sources() -> str:
    """Return the digest of the code that a run's numbers depend on."""
    parts = (TrainConfig.__module__, make_start.__module__)
    return study_digest(*parts, rows=[ALGORITHMS["ppo"]])


# --- one run ---


def run(config: TrainConfig, start: bytes) -> Record:
    """Train once.

    Parameters
    ----------
    config : TrainConfig
        Settings.
    start : bytes
        From `make_start`.

    Returns
    -------
    Record
        The history of `METRICS`, reviews of the trained policy and the time that it took.
    """
    begun = time.perf_counter()
    with one_thread():
        trainer = train(config, *unpack_start(start))
        asked = all_prompts()[:SAMPLES]
        chance = torch.Generator().manual_seed(0)
        written = sample(trainer.policy, asked, chance, max_tokens=COMPLETION_LENGTH)
    return {
        "config": config.settings(),
        "start": hashlib.sha256(start).hexdigest()[:16],
        "seconds": round(time.perf_counter() - begun, 2),
        "curves": {
            name: [round(m[name], digits) + 0.0 for m in trainer.history]  # no −0
            for name, digits in METRICS.items()
        },
        "samples": [decode(tokens) for tokens in written.tokens],
    }


def label(config: TrainConfig) -> str:
    """Return what a run is called in reports."""
    return " ".join(f"{name}={getattr(config, name)}" for name in AXES)


# --- all of them ---


def sweep(
    configs: Sequence[TrainConfig],
    folder: Path,
    *,
    workers: int = 2,
    scheduler: str | None = None,
    backend: str | None = None,
    tries: int = 3,
    report: Callable[[str], None] | None = None,
    task: Task = run,
    starter: Callable[[int], bytes] = make_start,
) -> list[Record]:
    """Finish every run that is not in the folder yet.

    Parameters
    ----------
    configs : sequence of TrainConfig
        The runs, all different.
    folder : Path
        Where finished runs are kept, a file each. Those that other code made are made anew.
    workers : int
        Processes on this machine.
    scheduler : str, optional
        Address of a Dask scheduler, such as ``tcp://10.0.0.1:8786``: run on its workers instead.
    backend : str, optional
        Of joblib, in the place of processes.
    tries : int
        How often a run is tried.
    report : callable, optional
        Told of failures; by default they are printed above the progress bar.
    task, starter : callable
        What a run is, and what it starts from.

    Returns
    -------
    list of Record
        In the order of `configs`.

    Raises
    ------
    SweepError
        If runs are missing after the last try. All others are kept.
    ValueError
        If runs are alike, `workers` or `tries` is below 1, or no scheduler answers.
    """
    for name, value in (("workers", workers), ("tries", tries)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value!r}")
    if len(set(configs)) != len(configs):
        raise ValueError(f"configs must all be different, got {len(configs)} with repetitions")
    made_by = sources()
    places = {config: folder / f"{_name(config, made_by)}.json" for config in configs}
    seeds = sorted({config.seed for config in configs})
    # Threads of one process share the number of threads: none may restore more than one.
    with one_thread(), _backend(workers, scheduler, backend) as parallel:
        for config, place in places.items():
            _drop_unless(place, label(config), partial(_is_of, config), report or tqdm.write)
        done = sum(place.exists() for place in places.values())
        bar = tqdm(total=len(configs), initial=done, unit="run", dynamic_ncols=True, smoothing=0)
        with bar:
            tell = report or bar.write
            if done:
                tell(f"{done} of {len(configs)} runs are in {folder} already")
            starts = {seed: folder / f"start-{seed}-{made_by}.pt" for seed in seeds}
            for seed, place in starts.items():
                readable = unpack_start if starter is make_start else len
                _drop_unless(place, f"start of seed {seed}", readable, tell)
            jobs = [_Job(f"start of seed {s}", p, _start, (starter, s)) for s, p in starts.items()]
            bar.set_description("preparing starts")
            _finish(jobs, parallel, tries, tell)
            bar.set_description("")
            bar.unpause()  # the time left is that of runs
            packed = {seed: place.read_bytes() for seed, place in starts.items()}
            jobs = [
                _Job(label(config), place, _encoded, (task, config, packed[config.seed]))
                for config, place in places.items()
            ]
            _finish(jobs, parallel, tries, tell, bar.update)
    return [json.loads(place.read_text(encoding="utf-8")) for place in places.values()]


@dataclass(frozen=True)
class _Job:
    """Something to compute once: what it is called, where its bytes are kept, and the call."""

    name: str
    place: Path
    function: Callable[..., bytes]
    arguments: tuple[Any, ...]


def _finish(
    jobs: Sequence[_Job],
    parallel: Parallel,
    tries: int,
    tell: Callable[[str], None],
    advance: Callable[[], object] = lambda: None,
) -> None:
    """Compute what is not kept yet, and keep each result as it comes."""
    for attempt in range(1, tries + 1):
        missing = {i: job for i, job in enumerate(jobs) if not job.place.exists()}
        if not missing:
            return
        # A job that fails hands back its error. What the loop itself raises is the loss of a
        # worker, which takes the jobs under way with it.
        try:
            for i, data, error in parallel(
                joblib.delayed(_attempt)(i, job.function, job.arguments)
                for i, job in missing.items()
            ):
                if error:
                    tell(f"failed ({attempt} of {tries}): {jobs[i].name}\n{error}")
                else:
                    write_atomically(jobs[i].place, data)
                    advance()
        except Exception as error:
            tell(f"broken off ({attempt} of {tries}): {type(error).__name__}: {error}")
    lost = [job.name for job in jobs if not job.place.exists()]
    if lost:
        names = "\n".join(f"  {name}" for name in lost)
        raise SweepError(
            f"{len(lost)} of {len(jobs)} are missing after {tries} tries; the others are in "
            f"{jobs[0].place.parent}:\n{names}"
        )


def _attempt(
    number: int, function: Callable[..., bytes], arguments: tuple[Any, ...]
) -> tuple[int, bytes, str]:
    """Return a result, or its error as text: not every error can be sent as it is."""
    try:
        return number, function(*arguments), ""
    except Exception:
        return number, b"", traceback.format_exc()


def _drop_unless(
    place: Path, name: str, fits: Callable[[bytes], object], tell: Callable[[str], None]
) -> None:
    """Remove a kept result that is broken or of other settings, so that it is made again."""
    if not place.exists():
        return
    try:
        good = bool(fits(place.read_bytes()))
    except Exception:  # of many kinds, by what is broken
        good = False
    if not good:
        tell(f"{place} is broken or of other settings: {name} is made again")
        place.unlink()


def _is_of(config: TrainConfig, data: bytes) -> bool:
    """Whether a kept result is of these settings."""
    return bool(json.loads(data)["config"] == json.loads(json.dumps(config.settings())))


def _start(starter: Callable[[int], bytes], seed: int) -> bytes:
    with _CHANCE:
        return starter(seed)


def _encoded(task: Task, config: TrainConfig, start: bytes) -> bytes:
    return json.dumps(task(config, start), allow_nan=False).encode()


def _name(config: TrainConfig, made_by: str) -> str:
    """Return the name of a run's file: the same settings and code, the same name."""
    text = json.dumps([config.settings(), made_by], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def _backend(workers: int, scheduler: str | None, backend: str | None) -> Iterator[Parallel]:
    """Yield joblib's `Parallel` for processes here or for a cluster."""
    # One run a task: the runs are long. Results as they come, so that each is kept at once.
    options: dict[str, Any] = {"batch_size": 1, "return_as": "generator_unordered"}
    if scheduler is None:
        with joblib.parallel_config(backend=backend or "loky", n_jobs=workers):
            yield joblib.Parallel(**options)
        return
    try:
        from distributed import Client
        from joblib._dask import DaskDistributedBackend
    except ImportError as error:
        raise ValueError(
            f"scheduler needs the package distributed (pip install 'ppo-demo[cluster]'), "
            f"got {scheduler!r}"
        ) from error
    try:
        client = Client(scheduler, set_as_default=False, timeout=10)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"scheduler must be the address of a Dask scheduler that runs, such as "
            f"tcp://10.0.0.1:8786, got {scheduler!r}"
        ) from error
    # joblib hands results over as they come where a backend says that it reports each; this one
    # does, and does not say so.
    streaming = type("Streaming", (DaskDistributedBackend,), {"supports_return_generator": True})
    with client, joblib.parallel_config(backend=streaming(client=client)):
        yield joblib.Parallel(**options)


# --- what the package keeps, and what it says ---


def save(records: Sequence[Record], path: Path = STORED) -> None:
    """Keep a sweep in the package, with what made it; a line a run."""
    common = {k: v for k, v in records[0]["config"].items() if k not in AXES}
    facts = {
        "sources": sources(),
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "settings": common,
        "starts": {str(r["config"]["seed"]): r["start"] for r in records},
    }
    lines = []
    for record in records:
        found = {name: record["config"][name] for name in AXES}
        rest = {name: record[name] for name in ("seconds", "samples", "curves")}
        lines.append(json.dumps({**found, **rest}, separators=(",", ":"), allow_nan=False))
    head = json.dumps(facts, indent=1).removesuffix("\n}")
    text = f'{head},\n "runs": [\n' + ",\n".join(lines) + "\n ]\n}\n"
    write_atomically(path, text.encode())
