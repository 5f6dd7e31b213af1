"""Runs the pages side by side, again when what they import has changed, and names failing cells.

jupyter-cache recognises a page by its own text. An edit of the package would leave the old
outputs in place, so each page has a cache of its own, named after it and a digest of what its
cells import and of the pinned versions.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from docutils import nodes
from filelock import FileLock
from jupyter_client.manager import AsyncKernelManager
from myst_nb.core.execute import cache, create_client
from myst_nb.core.read import create_nb_reader
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment
from sphinx.errors import ConfigError
from sphinx.util import logging
from traitlets import default

from ppo_demo.provenance import data, digest, modules

logger = logging.getLogger(__name__)

SOCKETS = tempfile.TemporaryDirectory(prefix="kernels")
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(?::[^\n]*\n)*(.*?)^```", re.MULTILINE | re.DOTALL)


def caches(app: Sphinx) -> Path:
    """Return the folder of all pages' caches."""
    return Path(app.outdir).parent / ".jupyter_cache"


def check_dependencies(app: Sphinx, config: Config) -> None:
    """Refuse a misspelt dependency: it would guard nothing."""
    for name in config.execution_depends:
        path = Path(app.srcdir, config.execution_root, name)
        if not path.is_file():
            raise ConfigError(f"execution_depends must be files, got {name!r}: there is no {path}")


def page_cache(app: Sphinx, name: str, text: str) -> str | None:
    """Return the name of a page's cache, after what its cells depend on; None without cells."""
    cells = CELL.findall(text)
    if not cells:
        return None
    root = Path(app.srcdir, app.config.execution_root).resolve()
    try:
        found = modules("\n".join(cells), root)
    except SyntaxError:  # a magic, or a cell that is to fail: anything may matter
        found = sorted(root.glob("ppo_demo/**/*.py"))
    files = {*found, *(beside for path in found for beside in data(path))}
    files |= {root / name for name in app.config.execution_depends}
    return f"{name.replace('/', '-')}-{digest(files, root, Path.read_bytes)}"


def pages(app: Sphinx, env: BuildEnvironment) -> Iterator[tuple[str, str]]:
    """Yield every page with cells, and the name of its cache."""
    for name in env.found_docs:
        found = page_cache(app, name, Path(env.doc2path(name)).read_text(encoding="utf-8"))
        if found:
            yield name, found


def outdated(app: Sphinx, env: BuildEnvironment, *_: set[str]) -> list[str]:
    """Read a page again if what its cells import has changed; drop caches that are of no page."""
    before: dict[str, str] = getattr(env, "execution_caches", {})
    now = dict(pages(app, env))
    env.execution_caches = now  # type: ignore[attr-defined]
    for stale in caches(app).glob("*"):
        if stale.name not in now.values():
            shutil.rmtree(stale, ignore_errors=True)
    return [name for name, found in now.items() if before.get(name) != found]


def choose_cache(app: Sphinx, name: str, content: list[str]) -> None:
    """Point myst-nb at the page's own cache."""
    found = page_cache(app, name, content[0]) or "none"
    app.env.mystnb_config.execution_cache_path = str(caches(app) / found)  # type: ignore[attr-defined]


class LocalKernel(AsyncKernelManager):
    """A kernel that is spoken to through files of this user, not over the network."""

    @default("transport")
    def _transport(self) -> str:
        return "tcp" if os.name == "nt" else "ipc"  # Windows has no such files

    @default("connection_file")
    def _connection_file(self) -> str:
        # Of a short name: that of a socket may have some hundred letters at most.
        return str(Path(SOCKETS.name, f"{uuid4().hex[:8]}.json"))


class Quiet:
    """A log for myst-nb that passes on what runs; what fails is said when the page is read."""

    def __init__(self, place: str) -> None:
        self.place = place

    def info(self, message: str, **_: object) -> None:
        """Say which page it is about."""
        logger.info("%s: %s", self.place, message)

    def debug(self, *_: object, **__: object) -> None:
        """Say nothing."""

    warning = error = debug


def run(app: Sphinx, env: BuildEnvironment, name: str, found: str) -> None:
    """Run a page unless its outputs are in its cache."""
    path, folder = str(env.doc2path(name)), caches(app) / found
    text = Path(path).read_text(encoding="utf-8")
    config = env.mystnb_config.copy(execution_cache_path=str(folder))  # type: ignore[attr-defined]
    reader = create_nb_reader(path, env.myst_config, config, text)  # type: ignore[attr-defined]
    if reader is None:
        return
    for attempt in ("first", "second"):
        try:
            with create_client(reader.read(text), path, config, Quiet(path), reader.read_fmt):
                return
        except Exception as error:  # of many kinds, by what is broken
            if attempt == "second" or not folder.exists():
                return  # it is raised again where the page is read
            logger.info("%s: its cache is broken (%s) and made anew", path, type(error).__name__)
            shutil.rmtree(folder, ignore_errors=True)


def run_side_by_side(app: Sphinx, env: BuildEnvironment, names: list[str]) -> None:
    """Run the pages that are to be read, as many at once as there are cores, the longest first."""
    names_of: dict[str, str] = env.execution_caches  # type: ignore[attr-defined]
    todo = [name for name in names if name in names_of]

    def weight(name: str) -> int:
        # Of the seconds nothing is known; what trains takes long, then what has more cells.
        text = Path(env.doc2path(name)).read_text(encoding="utf-8")
        return sum(len(code) * (1 + 9 * ("train" in code)) for code in CELL.findall(text))

    todo.sort(key=weight, reverse=True)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for future in [pool.submit(run, app, env, name, names_of[name]) for name in todo]:
            future.result()


def one_at_a_time(app: Sphinx) -> None:
    """Let builds into the same folder wait for one another."""
    folder = Path(app.outdir).parent
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    lock.acquire()
    app.connect("build-finished", lambda *_: lock.release())


def first_line(page: Path, near: int) -> int:
    """Return the line on which a cell's code begins; myst-nb knows its fence, give or take."""
    lines = page.read_text(encoding="utf-8").splitlines()
    fences = [n for n, text in enumerate(lines[:near], 1) if "{code-cell}" in text]
    line = fences[-1] + 1 if fences else near
    while line < len(lines) and lines[line - 1].startswith(":"):  # options
        line += 1
    return line


def report_errors(app: Sphinx, doctree: nodes.document) -> None:
    """Name file, line and exception of each cell that raised."""
    for node in doctree.findall(nodes.literal_block):
        if "traceback" not in node["classes"]:
            continue
        trace = node.astext().strip()
        source = app.env.doc2path(app.env.docname)
        within = re.findall(r"^Cell In\[\d+\], line (\d+)", trace, re.MULTILINE)
        line = first_line(Path(source), node.line or 1) + int(within[-1] if within else 1) - 1
        error = trace.splitlines()[-1]
        logger.error("the cell raised %s", error, location=f"{source}:{line}", type="execution")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    # A kernel sends what is printed in pieces, cut by a clock. The client joins them as they were;
    # myst-nb would end each with a new line, so that slow machines break lines that others do not.
    cache.single_nb_execution = partial(
        cache.single_nb_execution, coalesce_streams=True, kernel_manager_class=LocalKernel
    )
    # Kernels run side by side; and with one thread sums are the same on any machine.
    os.environ["OMP_NUM_THREADS"] = "1"
    app.add_config_value("execution_root", "..", "", str)
    app.add_config_value("execution_depends", [], "", list)
    app.connect("config-inited", check_dependencies)
    app.connect("builder-inited", one_at_a_time)
    app.connect("env-get-outdated", outdated)
    app.connect("env-before-read-docs", run_side_by_side)
    app.connect("source-read", choose_cache)
    app.connect("doctree-read", report_errors)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
