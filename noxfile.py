"""Everything that is run on this project: `nox -l` lists it, `nox -s NAME` runs one."""

import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "tests", "book"]
nox.options.error_on_external_run = True

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
BUILD = ROOT / "book" / "_build"
DOCTREES = BUILD / "doctrees"  # beside the site, not in it: they are not published
# Warnings are errors, dangling references are warnings.
STRICT = ["-W", "--keep-going", "-n"]


def install(session: nox.Session, *requirements: str) -> None:
    """Install with every version pinned, those of build tools included."""
    pins = {"PIP_CONSTRAINT": str(CONSTRAINTS), "PIP_BUILD_CONSTRAINT": str(CONSTRAINTS)}
    session.install(*requirements, env=pins)


@nox.session
def book(session: nox.Session) -> None:
    """Build the site; with `-- serve`, also serve it on localhost."""
    install(session, "-e", ".[book]")
    site = BUILD / "html"
    session.run("sphinx-build", *STRICT, "-b", "html", "-d", str(DOCTREES), "book", str(site))
    session.log(f"the site is in {site}: open {site / 'index.html'}")
    if "serve" in session.posargs:
        session.run("python", "-m", "http.server", "--bind", "127.0.0.1", "-d", str(site), "8000")


@nox.session
def serve(session: nox.Session) -> None:
    """Serve the site with live reload: pages and package are watched, edits rebuild it."""
    install(session, "-e", ".[book]", "sphinx-autobuild")
    watched = ["--watch", "ppo_demo", "--ignore", "*/_build/*", "--ignore", "*/__pycache__/*"]
    target = str(BUILD / "html")
    options = ["-n", "-d", str(DOCTREES)]
    session.run("sphinx-autobuild", *options, *watched, *session.posargs, "book", target)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests, in a browser too; arguments go to pytest (`-- -m "not slow"`, `-- -n 0`)."""
    install(session, "-e", ".[tests]")
    session.run("python", "tests/browser.py")  # finds a Chromium, or gets one, or fails
    # Two processes, whatever the machine: each runs a browser or trains on one thread.
    session.run("pytest", "-n", "2", "--dist", "worksteal", *session.posargs)


@nox.session
def benchmark(session: nox.Session) -> None:
    """Measure speed, each as a ratio against a peer in the same run; prints what it found."""
    install(session, "-e", ".[tests]")
    session.run("python", "tests/browser.py")
    chosen = ["tests/benchmarks", "-o", "python_files=bench_*.py"]
    session.run("pytest", "-s", *chosen, *session.posargs)


@nox.session
def sweep(session: nox.Session) -> None:
    """Make the training runs of Lab C anew, a quarter of an hour or so on two cores.

    A stopped session goes on where it was; one that is done leaves nothing to go on from.
    """
    install(session, "-e", ".[cluster]")
    folder = ROOT / ".cache" / "sweep"
    options = ["--folder", str(folder), "--save"]
    session.run("python", "-m", "ppo_demo", "sweep", *options, *session.posargs)
    shutil.rmtree(folder)


@nox.session
def speed(session: nox.Session) -> None:
    """Measure an iteration of reinforcement learning against TRL's, in turn in one run."""
    install(session, "-e", ".", "pytest", "trl")
    chosen = ["tests/benchmarks", "-o", "python_files=speed_*.py", "-o", "filterwarnings=default"]
    session.run("pytest", "-s", "--noconftest", "-o", "pythonpath=", *chosen, *session.posargs)


@nox.session
def parity(session: nox.Session) -> None:
    """Hold values and gradients against stable-baselines3, torchrl and TRL."""
    peers = ["stable-baselines3", "torchrl", "trl"]
    install(session, "-e", ".", "pytest", *peers)
    # An environment of its own: no browser, and the peers' own warnings are not ours.
    chosen = ["tests/parity", "-o", "python_files=parity_*.py", "-o", "filterwarnings=default"]
    session.run("pytest", "--noconftest", "-o", "pythonpath=", *chosen, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types and spelling."""
    stubs = ["types-docutils", "types-tqdm"]
    install(session, "-e", ".[book]", "ruff", "mypy", "codespell", "nox", *stubs)
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("codespell")


@nox.session(venv_backend="none")
def clean(session: nox.Session) -> None:
    """Remove what was built, the page cache included."""
    shutil.rmtree(BUILD, ignore_errors=True)
    session.log(f"removed {os.path.relpath(BUILD)}")
