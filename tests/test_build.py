"""What must fail a build does, and says where; what must run again does, and nothing else."""

import filecmp
import html
import re
import shutil
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, build

pytestmark = pytest.mark.slow

FRONT = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n\n"


@pytest.fixture
def book(tmp_path):
    """A small book with the real configuration, extensions and package sources around it."""
    source = tmp_path / "book"
    ignore = shutil.ignore_patterns("_build", "*.md", "__pycache__")
    shutil.copytree(ROOT / "book", source, ignore=ignore)
    shutil.copytree(ROOT / "ppo_demo", tmp_path / "ppo_demo")
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    (source / "index.md").write_text("# Home\n\n```{toctree}\n:glob:\n\n*\n```\n")
    (source / "references.md").write_text("# References\n\n```{bibliography}\n```\n")
    return source


def page(book, text, name="page"):
    (book / f"{name}.md").write_text(textwrap.dedent(text))


def fails(book, place, message):
    result = build(book, book / "_build/html")
    assert result.returncode != 0
    assert re.search(rf"{place}: (ERROR|WARNING): .*{message}", result.stderr), result.stderr


QUESTION = "# Page\n\n:::{quiz}\nWhich?\n\n"
BROKEN = {
    "no right option": (
        QUESTION + "- [ ] one\n\n  No.\n- [ ] two\n\n  No.\n:::\n",
        "page.md:3",
        "must have one right option, got 0",
    ),
    "two right options": (
        QUESTION + "- [x] one\n\n  Yes.\n- [x] two\n\n  Yes.\n:::\n",
        "page.md:3",
        "must have one right option, got 2",
    ),
    "one option": (
        QUESTION + "- [x] one\n\n  Yes.\n:::\n",
        "page.md:3",
        "must have two options or more, got 1",
    ),
    "no explanation": (
        QUESTION + "- [x] one\n\n  Yes.\n- [ ] two\n:::\n",
        "page.md:9",
        "option .* has no explanation",
    ),
    "no mark": (
        QUESTION + "- [x] one\n\n  Yes.\n- two\n\n  No.\n:::\n",
        "page.md:9",
        r"an option must start with \[ \] or \[x\]",
    ),
    "no options": (QUESTION + "Nothing.\n:::\n", "page.md:3", "must end with a list of options"),
    "no question": (
        "# Page\n\n:::{quiz}\n- [x] one\n\n  Yes.\n- [ ] two\n\n  No.\n:::\n",
        "page.md:3",
        "must have its question before",
    ),
    "empty quiz": ("# Page\n\n:::{quiz}\n:::\n", "page.md:3", "must end with a list of options"),
    "inline equation": ("# Page\n\nSee $\\frac{1}{$.\n", "page.md:3", "equation does not convert"),
    "unknown command": (
        "# Page\n\nText.\n\n$$\n\\foo\n$$\n",
        "page.md:5",
        r"equation does not convert: .*Unknown command",
    ),
    "equation reference": ("# Page\n\nSee {eq}`eq-none`.\n", "page.md:3", "eq-none"),
    "listing": (
        "# Page\n\n```{listing} ppo_demo.losses.nothing\n```\n",
        "page.md:3",
        "listing must be a function or class of the package",
    ),
    "page reference": ("# Page\n\nSee {doc}`nowhere`.\n", "page.md:3", "nowhere"),
    "link": ("# Page\n\nSee [this](nowhere.md).\n", "page.md:3", "nowhere"),
    "citation": ("# Page\n\nSee {cite}`nobody2000`.\n", "page.md:3", "nobody2000"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_page_fails_with_file_and_line(book, fault):
    text, place, message = BROKEN[fault]
    page(book, text)
    fails(book, place, message)


def test_cell_that_raises_fails_with_file_line_and_error(book):
    page(book, FRONT + "# Page\n\n```{code-cell} python3\n:tags: [keep]\nx = 0\n1 / x\n```\n")
    fails(book, "page.md:12", "the cell raised ZeroDivisionError: division by zero")


def test_warning_in_a_cell_fails(book):
    page(
        book,
        FRONT + '# Page\n\n```{code-cell} python3\nimport sys\nprint("!", file=sys.stderr)\n```\n',
    )
    fails(book, r"page.md:\d+", "stderr was found")


def test_explorer_with_nan_fails_with_file_and_line(book):
    page(
        book,
        FRONT
        + """\
        # Page

        ```{code-cell} python3
        import numpy as np
        from ppo_demo.explorer import Channels, Explorer, Slider

        def compute(x):
            return Channels(curves={"line": (x[:, None], np.log(x[:, None] - 1))})

        Explorer("e", "E", [Slider("x", (1, 2), 2, "x")], compute, None, [], "A line.")
        ```
        """.replace("        ", ""),
    )
    fails(book, r"page.md:\d+", "curve 'line' of explorer 'e' must be finite, got -inf at x=1")


def executed(result):
    assert result.returncode == 0, result.stdout + result.stderr
    return sorted(re.findall(r"(\w+)\.md: Executed notebook", result.stdout))


def test_only_what_changed_runs_again(book):
    """Of the package only what a page imports, directly or not, concerns it."""
    cells = {
        "bandit": "from ppo_demo.bandit import simulate",
        "labs": "from ppo_demo import labs",
        "plain": "print('plain')",
    }
    for name, cell in cells.items():
        page(book, FRONT + f"# {name}\n\n```{{code-cell}} python3\n{cell}\n```\n", name)
    target = book / "_build/html"
    assert executed(build(book, target)) == ["bandit", "labs", "plain"]
    assert executed(build(book, target)) == []

    page(book, FRONT + "# plain\n\n```{code-cell} python3\nprint('new')\n```\n", "plain")
    assert executed(build(book, target)) == ["plain"]
    assert "new" in (target / "plain.html").read_text()
    page(book, FRONT + "# Plain\n\n```{code-cell} python3\nprint('new')\n```\n", "plain")
    assert executed(build(book, target)) == []  # prose
    assert "<h1>Plain" in (target / "plain.html").read_text()

    for edited, runs in (
        ("ppo_demo/surrogates.py", ["bandit", "labs"]),
        ("ppo_demo/explorer.py", ["labs"]),
        ("ppo_demo/explorer.js", ["labs"]),
        ("ppo_demo/figure.css", ["labs"]),
        ("ppo_demo/lm/effects.json", []),
        ("ppo_demo/lm/pitfalls.py", []),
        ("constraints.txt", ["bandit", "labs", "plain"]),
    ):
        path = book.parent / edited
        path.write_text(path.read_text() + "\n")
        assert executed(build(book, target)) == runs, edited
    assert executed(build(book, target)) == []
    # The caches of earlier sources are gone.
    assert len(list((book / "_build/.jupyter_cache").iterdir())) == 3


def test_broken_cache_is_noticed_and_made_anew(book):
    page(book, FRONT + "# one\n\n```{code-cell} python3\nprint('one')\n```\n", "one")
    target = book / "_build/html"
    build(book, target)
    first = (target / "one.html").read_bytes()
    for pattern in ("*/global.db", "*/executed/*/base.ipynb"):
        (broken,) = (book / "_build/.jupyter_cache").glob(pattern)
        broken.write_bytes(b"not what it was")
        (book / "one.md").touch()
        shutil.rmtree(book / "_build/doctrees")
        result = build(book, target)
        assert executed(result) == ["one"], pattern
        assert "its cache is broken" in result.stdout
        assert (target / "one.html").read_bytes() == first


def test_builds_into_one_folder_wait_for_one_another(book):
    for name in ("one", "two"):
        page(book, FRONT + f"# {name}\n\n```{{code-cell}} python3\nprint('{name}')\n```\n", name)
    target = book / "_build/html"
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: build(book, target), range(2)))
    assert sorted(map(executed, results)) == [[], ["one", "two"]]
    assert "one" in (target / "one.html").read_text()


def test_log_has_no_warnings_of_kernels(book):
    page(book, FRONT + "# one\n\n```{code-cell} python3\nprint('one')\n```\n", "one")
    result = build(book, book / "_build/html")
    assert "WARN" not in result.stdout + result.stderr


def test_listing_is_the_source_with_the_first_paragraph_of_its_docstring(book):
    page(book, "# Page\n\n```{listing} ppo_demo.lm.step.descend\n```\n")
    target = book / "_build/html"
    assert build(book, target).returncode == 0
    text = re.sub("<[^>]*>", "", (target / "page.html").read_text())
    assert '"""Take one gradient step."""\n    optimizer.zero_grad()' in html.unescape(text)
    assert "A longer gradient is scaled" not in text


def test_pages_say_which_runs_and_how_long_it_took(book):
    page(book, FRONT + "# Page\n\n```{code-cell} python3\nprint(1)\n```\n")
    result = build(book, book / "_build/html")
    assert re.search(r"page\.md: Executing notebook", result.stdout)
    assert re.search(r"page\.md: Executed notebook in [\d.]+ seconds", result.stdout)


def test_line_that_is_printed_slowly_stays_one_line(book):
    cell = 'import time\n\nprint("first,", end=" ")\ntime.sleep(1)\nprint("second\\n\\nthird")\n'
    page(book, f"{FRONT}# Page\n\n```{{code-cell}} python3\n{cell}```\n")
    assert build(book, book / "_build/html").returncode == 0
    assert "first, second\n\nthird\n<" in (book / "_build/html/page.html").read_text()


def test_misspelt_dependency_is_refused(book):
    conf = book / "conf.py"
    conf.write_text(conf.read_text().replace('"constraints.txt"', '"constrains.txt"'))
    result = build(book, book / "_build/html")
    assert result.returncode != 0
    assert "execution_depends must be files, got 'constrains.txt'" in result.stderr


def test_quiz_with_maths_and_code_renders(book):
    page(
        book,
        "# Page\n\n:::{quiz}\nIs $r_t$ here?\n\n```python\nr = 1\n```\n\n"
        "- [x] yes, `r`\n\n  It is $1$.\n- [ ] no\n\n  It is.\n:::\n",
    )
    target = book / "_build/html"
    assert build(book, target).returncode == 0
    html = (target / "page.html").read_text()
    legend = re.search(r"<legend>.*?</legend>", html, re.DOTALL)[0]
    assert "<math>" in legend
    assert html.index("</legend>") < html.index("highlight-python") < html.index("quiz-option")
    assert re.search(r"<label.*?<code.*?r.*?</code>.*?</label>", html, re.DOTALL)


def test_same_sources_build_the_same_bytes(tmp_path):
    """Two builds from nothing, in two places."""
    for place in ("one", "two"):
        copy = tmp_path / place / "book"
        ignore = shutil.ignore_patterns("_build", "__pycache__")
        shutil.copytree(ROOT / "book", copy, ignore=ignore)
        shutil.copytree(ROOT / "ppo_demo", tmp_path / place / "ppo_demo", ignore=ignore)
        shutil.copy(ROOT / "constraints.txt", tmp_path / place)
        result = build(copy, tmp_path / place / "built/html")
        assert result.returncode == 0, result.stderr
    one, two = tmp_path / "one/built/html", tmp_path / "two/built/html"
    shipped = {
        path.relative_to(one)
        for path in one.rglob("*")
        if path.is_file() and "reports" not in path.parts
    }
    assert len(shipped) > 20
    different = [p for p in sorted(shipped) if not filecmp.cmp(one / p, two / p, shallow=False)]
    assert different == []
