"""The repository as a newcomer finds it."""

import re
import subprocess

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def texts():
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in tracked.stdout.split("\0") if name]
    return {
        p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8")
        for p in paths
        if p.is_file() and p.suffix not in {".png", ".npz"}
    }


def test_readme_has_the_two_commands(texts):
    readme = texts["README.md"]
    for session in ("book", "tests"):
        line = rf"^ *python3 -m venv \.venv && .*\.venv/bin/nox -s {session}$"
        assert len(re.findall(line, readme, re.MULTILINE)) == 1


def test_no_path_of_one_machine_and_no_registry(texts):
    # The brackets keep each pattern from finding itself.
    forbidden = r"/[r]oot/|/[h]ome/|/[t]mp/|pypi[.]org|[p]ytorch[.]org/whl"
    found = [(name, re.findall(forbidden, text)) for name, text in texts.items()]
    found = [(name, hits) for name, hits in found if hits]
    assert found == []


def test_no_generated_site_is_kept(texts):
    assert not [
        name
        for name in texts
        if name.startswith("book/_build")
        or (name.endswith(".html") and not name.startswith("book/_templates/"))
    ]


def test_every_version_is_pinned(texts):
    lines = [x for x in texts["constraints.txt"].splitlines() if x and not x.startswith("#")]
    assert len(lines) > 100
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    assert "torch==2.13.0" in lines


def test_every_reference_is_cited(texts):
    keys = set(re.findall(r"^@\w+\{([^,]+),", texts["book/references.bib"], re.MULTILINE))
    pages = "".join(text for name, text in texts.items() if re.fullmatch(r"book/\w+\.md", name))
    cited = {
        key for group in re.findall(r"\{cite:\w\}`([^`]+)`", pages) for key in group.split(",")
    }
    assert cited == keys
