"""A stored study is stale when what it computed has changed, and only then."""

import shutil

import pytest
from conftest import ROOT

from ppo_demo.algorithms import ALGORITHMS
from ppo_demo.provenance import modules, study_digest


@pytest.fixture
def root(tmp_path):
    shutil.copytree(ROOT / "ppo_demo", tmp_path / "ppo_demo")
    return tmp_path


def digest(root, *keys):
    rows = [ALGORITHMS[key] for key in keys or ("ppo",)]
    return study_digest("ppo_demo.lm.trainer", rows=rows, root=root)


def edit(root, name, old, new):
    path = root / "ppo_demo" / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_comments_docstrings_layout_and_new_rows_change_nothing(root):
    before = digest(root)
    for name, old, new in (
        ("surrogates.py", "How much likelier", "By how much likelier"),
        ("lm/model.py", "# finite: 0 · ∞", "# it is finite: 0 · ∞"),
        ("_arrays.py", "MAX_LOG = 80.0", "MAX_LOG = (\n    80.0\n)"),
        ("algorithms.py", "_ROWS = (", "_ROWS = (\n    replace(ALGORITHMS['ppo'], name='new'),"),
        ("lm/effects.py", "SIZES = (1, 2", "SIZES = (1, 3"),  # not of this run
        ("figures.py", "def style", "def styled"),
    ):
        edit(root, name, old, new)
        assert digest(root) == before, name


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("surrogates.py", "1 - low", "1 + low"),
        ("_arrays.py", "MAX_LOG = 80.0", "MAX_LOG = 79.0"),
        ("lm/corpus.py", "PROMPT_LENGTH = 2", "PROMPT_LENGTH = 3"),  # through another module
        ("advantages.py", "gamma * lam", "gamma + lam"),
    ],
)
def test_a_change_of_what_is_computed_changes_it(root, name, old, new):
    before = digest(root)
    edit(root, name, old, new)
    assert digest(root) != before


def test_the_rows_that_ran_count(root):
    assert digest(root, "ppo") != digest(root, "grpo") != digest(root, "ppo", "grpo")


def test_modules_are_found_through_one_another(root):
    found = {p.relative_to(root).as_posix() for p in modules("from ppo_demo.lm import coins", root)}
    assert {"ppo_demo/__init__.py", "ppo_demo/lm/coins.py", "ppo_demo/surrogates.py"} < found
    assert "ppo_demo/labs.py" not in found
    assert modules("import math, numpy as np", root) == []
