"""Ties the pages' outputs to the code that computed them, and names the cell that failed.

jupyter-cache recognises a page by its own text. An edit of the package would leave the old
outputs in place, so the cache's folder is named after a digest of everything else that the
outputs depend on; a change of it is a change of configuration, and every page runs again.
"""

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from docutils import nodes
from myst_nb.core.execute import cache
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ConfigError
from sphinx.util import logging

from ppo_demo.provenance import digest

logger = logging.getLogger(__name__)


def choose_cache(app: Sphinx, config: Config) -> None:
    """Point myst-nb at the cache of the present sources; drop those of earlier ones."""
    root = Path(app.srcdir, config.execution_root)
    caches = Path(app.outdir).parent / ".jupyter_cache"
    try:
        current = caches / digest(root, config.execution_depends)
    except ValueError as error:
        raise ConfigError(f"execution_depends: {error}") from None
    for stale in caches.glob("*"):
        if stale != current:
            shutil.rmtree(stale)
    config.nb_execution_cache_path = str(current)


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
    cache.single_nb_execution = partial(cache.single_nb_execution, coalesce_streams=True)
    app.add_config_value("execution_root", "..", "", str)
    app.add_config_value("execution_depends", [], "", list)
    app.connect("config-inited", choose_cache)
    app.connect("doctree-read", report_errors)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
