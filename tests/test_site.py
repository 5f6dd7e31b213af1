"""The built site in a real browser: labs, quiz, colours, keyboard, no script, no other host."""

import functools
import gzip
import http.server
import re
import threading

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import Quiet
from playwright.sync_api import expect

from ppo_demo.labs import clipping_lab, policy_update_lab, training_lab
from ppo_demo.lm.results import load

PAGES = [
    "index.html",
    "ppo.html",
    "variants.html",
    "rlhf.html",
    "hyperparameters.html",
    "overoptimisation.html",
    "references.html",
]
LABS = {"lab-a": policy_update_lab(), "lab-b": clipping_lab(), "lab-c": training_lab(load())}
HOME = {"lab-a": "ppo.html", "lab-b": "ppo.html", "lab-c": "hyperparameters.html"}

# Ten grid points a lab: the corners, and some of the inside.
POINTS = {
    "lab-a": [
        *(
            (rate, clip, weight)
            for rate in (0.01, 2.6)
            for clip in (0.05, 0.5)
            for weight in (0, 10)
        ),
        (0.32, 0.25, 0.03),
        (1.3, 0.2, 0),
    ],
    "lab-b": [
        *((ratio, a, clip) for ratio in (0, 2.5) for a in (-2, 2) for clip in (0.05, 0.5)),
        (1.3, -0.8, 0.2),
        (0.75, -1.1, 0.15),
    ],
    "lab-c": [
        *(
            (rate, clip, weight, metric)
            for rate, metric in ((1e-4, 0), (3e-2, 4))
            for clip in (0.05, 0.4)
            for weight in (0, 1)
        ),
        (1e-2, 0.2, 0.05, 2),
        (1e-3, 0.1, 0.01, 3),
    ],
}
CASES = [(lab, point) for lab, points in POINTS.items() for point in points]


def numbers(text):
    return np.array([float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", text)])


def drawn(lab, setting):
    """Where matplotlib puts things at this setting, drawn afresh: no grid, no packing."""
    at = lab.at(**setting)
    figure = lab.draw(at)
    height = figure.get_figheight() * 72
    artists = {a.get_gid(): a for a in figure.findobj() if a.get_gid()}
    paths, shifts = {}, {}
    for gid in at.curves:
        points = artists[gid].get_transform().transform(artists[gid].get_path().vertices)
        paths[gid] = (points * [1, -1] + [0, height]).ravel()
    for gid, place in at.moves.items():
        data = artists[gid].axes.transData
        x, y = data.transform([float(v) for v in place]) - data.transform([0, 0])
        shifts[gid] = np.array([x, -y])
    return paths, shifts


def check(page, lab, setting):
    at = lab.at(**setting)
    paths, shifts = drawn(lab, setting)
    panel = page.locator(f"#{lab.name}")
    texts = panel.locator(".ppo-readout").all_inner_texts()
    assert texts == [lab.read(readout, at) for readout in lab.readouts]
    for gid, expected in paths.items():
        found = numbers(page.locator(f"#{lab.name}-{gid}").get_attribute("d"))
        np.testing.assert_allclose(found, expected[: len(found)], atol=0.051, err_msg=gid)
    for gid, expected in shifts.items():
        found = numbers(page.locator(f"#{lab.name}-{gid}").get_attribute("transform"))
        np.testing.assert_allclose(found, expected, atol=0.051, err_msg=gid)
    for gid, expected in at.widths.items():
        found = float(page.locator(f"#{lab.name}-{gid}").get_attribute("stroke-width"))
        assert found == pytest.approx(float(expected), abs=0.051)
    for gid, there in at.shown.items():
        hidden = page.locator(f"#{lab.name}-{gid}").get_attribute("display")
        assert hidden == (None if there else "none")
    excerpts = panel.locator(".ppo-text").all_text_contents()
    assert excerpts == [str(text) for text in at.texts.values()]
    for slider in lab.sliders:
        text = slider.text(setting[slider.name])
        field = page.locator(f"#{lab.name}-{slider.name}")
        assert field.get_attribute("aria-valuetext") == text
        assert panel.locator(f'output[for="{lab.name}-{slider.name}"]').inner_text() == text


def by_mouse(field, index, last):
    field.scroll_into_view_if_needed()
    box = field.bounding_box()
    thumb = 16
    x = thumb / 2 + (box["width"] - thumb) * index / last
    field.click(position={"x": x, "y": box["height"] / 2})


def by_keyboard(field, index, last):
    field.focus()
    if index <= last / 2:
        field.press("Home")
        for _ in range(index):
            field.press("ArrowRight")
    else:
        field.press("End")
        for _ in range(last - index):
            field.press("ArrowLeft")


@pytest.mark.parametrize(
    ("name", "move"),
    [
        ("lab-a", by_mouse),
        ("lab-c", by_keyboard),
        # Each way of moving and a lab of each kind are in the everyday subset.
        *(pytest.param(name, by_mouse, marks=pytest.mark.slow) for name in ("lab-b", "lab-c")),
        *(pytest.param(name, by_keyboard, marks=pytest.mark.slow) for name in ("lab-a", "lab-b")),
    ],
)
def test_each_slider_shows_what_python_computed(open_page, name, move):
    page, lab = open_page(HOME[name]), LABS[name]
    names = [slider.name for slider in lab.sliders]
    for point in POINTS[name]:
        setting = dict(zip(names, point, strict=True))
        for slider in lab.sliders:
            index = list(slider.values).index(setting[slider.name])
            move(page.locator(f"#{name}-{slider.name}"), index, len(slider.values) - 1)
        check(page, lab, setting)


@pytest.mark.parametrize("name", LABS)
def test_each_slider_alone_changes_the_picture(open_page, name):
    page, lab = open_page(HOME[name]), LABS[name]
    panel = page.locator(f"#{name}")

    def picture():
        return panel.locator("svg").evaluate("svg => svg.outerHTML")

    for slider in lab.sliders:
        before = picture()
        by_keyboard(page.locator(f"#{name}-{slider.name}"), 0, len(slider.values) - 1)
        assert picture() != before
        panel.get_by_role("button", name="Reset").click()
        assert picture() == before


@pytest.mark.parametrize("name", LABS)
def test_default_and_reset(open_page, name):
    page, lab = open_page(HOME[name]), LABS[name]
    default = {slider.name: slider.default for slider in lab.sliders}
    check(page, lab, default)
    page.locator(f"#{name}-{lab.sliders[0].name}").press("End")
    page.wait_for_function("location.hash.length > 1")
    page.locator(f"#{name}").get_by_role("button", name="Reset").press("Enter")
    check(page, lab, default)
    page.wait_for_function("location.hash === ''")


def test_fragment_restores_a_setting_and_both_labs_keep_theirs(open_page):
    page = open_page("ppo.html")
    page.locator("#lab-a-learning_rate").press("End")
    page.locator("#lab-b-advantage").press("Home")
    page.wait_for_function("location.hash.includes('lab-b.advantage')")
    fragment = page.evaluate("location.hash")
    assert fragment == "#lab-a.learning_rate=2.6&lab-b.advantage=-2"
    again = open_page("ppo.html" + fragment)
    check(again, LABS["lab-a"], {"learning_rate": 2.6, "clip_range": 0.2, "kl_weight": 0.01})
    check(again, LABS["lab-b"], {"ratio": 1.3, "advantage": -2, "clip_range": 0.2})


def test_fragment_off_the_grid_goes_to_the_nearest_and_nonsense_to_the_default(open_page):
    page = open_page("ppo.html#lab-a.learning_rate=0.3&lab-a.clip_range=wide&lab-a.kl_weight=99")
    check(page, LABS["lab-a"], {"learning_rate": 0.32, "clip_range": 0.2, "kl_weight": 10})


def test_ordinary_anchors_leave_the_labs_alone(open_page):
    page = open_page("ppo.html#self-check")
    page.locator("#lab-a-kl_weight").press("End")
    page.get_by_role("link", name="Intuition", exact=True).first.click()
    check(page, LABS["lab-a"], {"learning_rate": 0.08, "clip_range": 0.2, "kl_weight": 10})


def test_a_setting_is_spoken_once_the_hand_rests(open_page):
    page = open_page("ppo.html")
    page.locator("#lab-b-ratio").press("Home")
    said = page.locator("#lab-b .ppo-said")
    expect(said).to_have_text(
        "Unclipped objective, r × A: 0.000. Clipped ratio: 0.800. PPO objective: 0.000"
    )
    assert said.get_attribute("role") == "status"


def test_colours_follow_the_theme(open_page):
    seen = {}
    for scheme in ("light", "dark"):
        page = open_page("ppo.html", color_scheme=scheme)
        seen[scheme] = page.evaluate(
            """() => ['lab-a-ppo', 'lab-a-plain', 'lab-b-push'].map((id) => {
                const style = getComputedStyle(document.getElementById(id));
                return [style.stroke, style.fill];
            }).concat([getComputedStyle(document.querySelector('#lab-a text')).fill,
                       getComputedStyle(document.body).backgroundColor])"""
        )
    for light, dark in zip(seen["light"], seen["dark"], strict=True):
        assert light != dark


# --- quiz ---------------------------------------------------------------------------------------


def options(page, question, right):
    return page.locator(f'#quiz-{question} .quiz-option[data-right="{str(right).lower()}"] input')


def score(page):
    return page.locator(".quiz-score output")


def test_quiz_counts_right_and_wrong_answers_and_resets(open_page):
    page = open_page("ppo.html")
    expect(page.locator("fieldset.quiz")).to_have_count(5)
    expect(score(page)).to_have_text("Answered 0/5 · Correct 0/5")
    first = page.locator("#quiz-1")
    expect(first.locator(".quiz-explanation").first).to_be_hidden()

    options(page, 1, right=False).first.check()
    expect(score(page)).to_have_text("Answered 1/5 · Correct 0/5")
    for explanation in first.locator(".quiz-explanation").all():
        expect(explanation.locator("p").first).to_be_visible()
    expect(first.locator(".chosen .quiz-verdict")).to_have_text("✗ wrong")
    expect(first.locator('[data-right="true"] .quiz-verdict')).to_have_text("✓ right")
    # The first answer stands.
    options(page, 1, right=True).click(force=True)
    expect(score(page)).to_have_text("Answered 1/5 · Correct 0/5")
    expect(options(page, 1, right=False).first).to_be_checked()

    for question in range(2, 6):
        options(page, question, right=True).check()
    expect(score(page)).to_have_text("Answered 5/5 · Correct 4/5")
    page.get_by_role("button", name="Reset answers").click()
    expect(score(page)).to_have_text("Answered 0/5 · Correct 0/5")
    expect(first.locator(".quiz-explanation").first).to_be_hidden()
    expect(page.locator("fieldset.quiz input:checked")).to_have_count(0)


def test_quiz_by_keyboard_alone(open_page):
    page = open_page("ppo.html")
    inputs = page.locator("#quiz-2 input")
    right = page.locator("#quiz-2 .quiz-option").evaluate_all(
        "all => all.findIndex((o) => o.dataset.right === 'true')"
    )
    inputs.first.focus()
    for _ in range(right):
        page.keyboard.press("ArrowDown")  # moves, and does not answer on the way
    expect(inputs.nth(right)).to_be_focused()
    expect(score(page)).to_have_text("Answered 0/5 · Correct 0/5")
    page.keyboard.press("Space")
    expect(score(page)).to_have_text("Answered 1/5 · Correct 1/5")
    expect(inputs.nth(right)).to_be_focused()

    page.locator("#quiz-3 input").last.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#quiz-3 input").first).to_be_focused()
    page.keyboard.press("Enter")
    expect(score(page)).to_have_text("Answered 2/5 · Correct 1/5")
    reset = page.get_by_role("button", name="Reset answers")
    reset.focus()
    page.keyboard.press("Enter")
    expect(score(page)).to_have_text("Answered 0/5 · Correct 0/5")


@pytest.mark.parametrize("path", PAGES[:-1])
def test_every_page_ends_with_a_self_check(open_page, path):
    page = open_page(path)
    expect(page.locator("section").filter(has=page.locator("fieldset.quiz")).last).to_contain_text(
        "Self-check"
    )


# --- the page as a whole -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_no_violation(open_page, path, scheme):
    page = open_page(path, color_scheme=scheme)
    for details in page.locator("ppo-explorer details").all():
        details.locator("summary").click()
    results = Axe().run(page, options={"preload": False})  # it would resolve @import wrongly
    assert results.violations_count == 0, results.generate_report()
    for question in page.locator("fieldset.quiz").all():
        question.locator("input").first.check()
    results = Axe().run(page, options={"preload": False})  # it would resolve @import wrongly
    assert results.violations_count == 0, results.generate_report()


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("width", [375, pytest.param(1280, marks=pytest.mark.slow)])
def test_nothing_is_wider_than_the_page(open_page, path, width):
    page = open_page(path, viewport={"width": width, "height": 800})
    over = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert over <= 0


@pytest.mark.parametrize("path", PAGES)
def test_no_two_elements_share_an_id(site, path):
    ids = re.findall(r'\sid="([^"]+)"', (site / path).read_text(encoding="utf-8"))
    assert [name for name in set(ids) if ids.count(name) > 1] == []


def test_works_from_a_file(open_page):
    page = open_page("ppo.html", from_file=True)
    page.locator("#lab-a-learning_rate").press("End")
    check(page, LABS["lab-a"], {"learning_rate": 2.6, "clip_range": 0.2, "kl_weight": 0.01})
    page.wait_for_function("location.hash.includes('learning_rate=2.6')")
    options(page, 1, right=True).check()
    expect(score(page)).to_have_text("Answered 1/5 · Correct 1/5")


def test_lab_c_works_from_a_file(open_page):
    page = open_page("hyperparameters.html", from_file=True)
    page.locator("#lab-c-learning_rate").press("End")
    setting = {"learning_rate": 3e-2, "clip_range": 0.2, "kl_weight": 0.05, "metric": 1}
    check(page, LABS["lab-c"], setting)


def test_first_paint_does_not_wait_for_the_data_of_lab_c(chrome, site):
    """The server stops in the middle of the data, and goes on once the page was painted."""
    painted = threading.Event()

    class Slow(Quiet):
        def copyfile(self, source, outputfile):
            if not self.path.endswith("/hyperparameters.html"):
                super().copyfile(source, outputfile)
                return
            page = source.read()
            middle = page.index(b'<script type="application/json">') + 5000
            assert len(page) - middle > 100_000
            outputfile.write(page[:middle])
            outputfile.flush()
            self.server.waited = painted.wait(30)
            outputfile.write(page[middle:])

    handler = functools.partial(Slow, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        context = chrome.new_context()
        page = context.new_page()
        address = f"http://127.0.0.1:{httpd.server_port}/hyperparameters.html"
        page.goto(address, wait_until="commit")
        paint = "performance.getEntriesByName('first-contentful-paint').length > 0"
        page.wait_for_function(paint, timeout=15_000)
        assert page.get_by_role("heading", level=1).is_visible()
        assert page.locator("#lab-c svg").is_visible()
        painted.set()
        expect(page.locator("#lab-c form")).to_be_visible()  # a hidden slider takes no keys
        page.locator("#lab-c-learning_rate").press("End")
        expect(page.locator('output[for="lab-c-learning_rate"]')).to_have_text("0.03")
        assert httpd.waited
        context.close()
        httpd.shutdown()


def test_without_javascript_everything_can_be_read(open_page):
    page = open_page("ppo.html", java_script_enabled=False)
    other = open_page(HOME["lab-c"], java_script_enabled=False)
    for name, lab in LABS.items():
        panel = (other if name == "lab-c" else page).locator(f"#{name}")
        expect(panel.locator("svg")).to_be_visible()
        expect(panel.locator("form")).to_be_hidden()
        texts = panel.locator(".ppo-readout").all_inner_texts()
        assert texts == [lab.read(readout, lab.at()) for readout in lab.readouts]
        panel.locator("summary").click()
        expect(panel.locator("tbody tr")).to_have_count(1 + len(lab.table))
        expect(panel.locator("tbody tr").last).to_be_visible()
    for question in page.locator("fieldset.quiz").all():
        answer = question.locator(".quiz-answer")
        answer.locator("summary").click()
        letter = question.locator('[data-right="true"] .quiz-letter').inner_text()
        expect(answer.locator("p")).to_have_text(f"{letter} is right.")
        for explanation in question.locator(".quiz-explanation").all():
            explanation.locator("summary").click()
            expect(explanation.locator("p").first).to_be_visible()
    expect(page.locator(".quiz-score")).to_be_hidden()


def test_reduced_motion_is_respected(open_page):
    still = open_page("ppo.html", reduced_motion="reduce")
    lively = open_page("ppo.html", reduced_motion="no-preference")
    duration = "getComputedStyle(document.getElementById('lab-a-ppo-bot')).transitionDuration"
    assert still.evaluate(duration) == "0s"
    assert lively.evaluate(duration) != "0s"


def test_equations_are_mathml_in_the_books_font(open_page):
    page = open_page("ppo.html")
    assert page.locator("math").count() > 20
    labels = page.locator("div.math .eqno").all_inner_texts()
    assert [text[:5] for text in labels] == [f"(1.{n + 1})" for n in range(len(labels))]
    page.wait_for_function("document.fonts.ready.then(() => true)")
    assert page.evaluate("document.fonts.check('16px \"STIX Two Math Subset\"')")
    assert page.locator("script[src*=mathjax], script[src*=MathJax]").count() == 0
    reference = page.locator('a.reference.internal[href="#equation-eq-objective"]').first
    expect(reference).to_have_text("(1.2)")


def test_icons_are_drawn_without_the_script(open_page, site):
    page = open_page("ppo.html")
    assert not list(site.rglob("fontawesome*.js*"))
    masks = page.evaluate(
        """() => [...document.querySelectorAll('[class*="fa-"]')]
            .filter((icon) => icon.offsetWidth)
            .map((icon) => getComputedStyle(icon).maskImage)"""
    )
    assert masks
    assert all(mask.startswith("url(") for mask in masks)


def test_page_weight(site):
    """What the labs add to their pages, and the font, stay small."""
    for path, count, limit in (("ppo.html", 2, 80_000), ("hyperparameters.html", 1, 250_000)):
        html = (site / path).read_text(encoding="utf-8")
        data = re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
        assert len(data) == count
        assert len(gzip.compress("".join(data).encode())) < limit
    assert (site / "_static/math.woff2").stat().st_size < 60_000
    heavy = [p for p in site.rglob("*.js") if p.stat().st_size > 100_000]
    assert not heavy
