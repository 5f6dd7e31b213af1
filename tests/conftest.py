"""What the tests share: the built site, a server for it, and a browser that blocks other hosts."""

import functools
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import browser as chromium
import hypothesis
import pytest
import torch
from filelock import FileLock
from playwright.sync_api import Browser, Page, Route, sync_playwright

ROOT = Path(__file__).parent.parent
CASES = {
    case["id"]: case
    for case in json.loads((ROOT / "tests/cases/formulas.json").read_text(encoding="utf-8"))
}

torch.set_num_threads(1)
hypothesis.settings.register_profile("no clock", deadline=None)  # machines differ
hypothesis.settings.load_profile("no clock")


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Build a book as `nox -s book` does."""
    strict = ["-W", "--keep-going", "-n", "-b", "html", "-d", str(target.parent / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *strict, str(source), str(target)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The book, built into the folder that `nox -s book` uses, so that its page cache serves.

    Where several processes share the tests, the first to come builds it and the others wait.
    """
    target = ROOT / "book/_build/html"
    run = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        run = run.parent  # what the processes of one run have in common
    with FileLock(run / "site.lock"):
        if not (run / "site.built").exists():
            result = build(ROOT / "book", target)
            assert result.returncode == 0, result.stdout + result.stderr
            (run / "site.built").touch()
    return target


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="session")
def server(site: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


@pytest.fixture(scope="session")
def chrome() -> Iterator[Browser]:
    path = chromium.find()
    assert path, "no Chromium or Chrome: `python tests/browser.py` gets one"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=chromium.FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chrome: Browser, server: str, site: Path) -> Iterator:
    """A function that opens a page of the site; every request to another host fails the test."""
    contexts, faults = [], []

    def guard(route: Route) -> None:
        url = route.request.url
        if url.startswith((server, site.as_uri(), "data:")):
            route.continue_()
        else:
            faults.append(f"request to {url}")
            route.abort()

    def opened(path: str, *, from_file: bool = False, **options: object) -> Page:
        context = chrome.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        context.route("**/*", guard)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: faults.append(f"script error: {error}"))
        page.on(
            "console",
            lambda m: faults.append(f"console: {m.text}") if m.type == "error" else None,
        )
        page.on(
            "response",
            lambda r: faults.append(f"{r.status}: {r.url}") if r.status >= 400 else None,
        )
        page.goto(f"{site.as_uri() if from_file else server}/{path}")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not faults
