"""The ``quiz`` directive: a multiple-choice question whose answer is revealed on choosing.

The body is the question, then a list of options. ``[x]`` marks the right one; what follows an
option inside its list item is its explanation::

    :::{quiz}
    Which of these is even?

    - [ ] 3

      Three is one more than two.
    - [x] 4

      Four is two twos.
    :::
"""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)
MARK = re.compile(r"\[([ xX])\]\s+")


class quiz(nodes.General, nodes.Element):  # noqa: N801
    """A question: its legend, then one `quiz_option` each; `number` and `count` on the page."""


class quiz_legend(nodes.General, nodes.TextElement):  # noqa: N801
    """What is asked."""


class quiz_option(nodes.General, nodes.TextElement):  # noqa: N801
    """What can be chosen; `right` says whether it is."""


class quiz_explanation(nodes.General, nodes.Element):  # noqa: N801
    """Why the option before it is right or wrong."""


class quiz_score(nodes.General, nodes.Element):  # noqa: N801
    """Answered and correct of `count`."""


class Quiz(SphinxDirective):
    """Parse one question; a broken one is an error with file and line."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the question's node."""
        body = nodes.Element()
        self.state.nested_parse(self.content, self.content_offset, body)
        if not body.children or not isinstance(body.children[-1], nodes.bullet_list):
            return self.broken("a quiz must end with a list of options")
        *question, choices = body.children
        if not question or not isinstance(question[0], nodes.paragraph):
            return self.broken("a quiz must have its question before the options")
        node = quiz()
        self.set_source_info(node)
        node += quiz_legend("", "", *question[0].children)
        node += question[1:]
        for item in choices.children:
            first = item.children[0] if item.children else None
            text = first.children[0] if first is not None and first.children else None
            mark = MARK.match(text.astext()) if isinstance(text, nodes.Text) else None
            if not isinstance(first, nodes.paragraph) or text is None or mark is None:
                return self.broken("an option must start with [ ] or [x]", item)
            if len(item.children) < 2:
                return self.broken(f"option {first.astext()!r} has no explanation", item)
            first.replace(text, nodes.Text(text.astext()[mark.end() :]))
            node += quiz_option("", "", *first.children, right=mark[1] != " ")
            node += quiz_explanation("", *item.children[1:])
        marks = [o["right"] for o in node.findall(quiz_option)]
        if len(marks) < 2:
            return self.broken(f"a quiz must have two options or more, got {len(marks)}")
        if sum(marks) != 1:
            return self.broken(f"a quiz must have one right option, got {sum(marks)}")
        return [node]

    def broken(self, message: str, where: nodes.Node | None = None) -> list[nodes.Node]:
        """Log an error at the directive, or at the option that is at fault."""
        line = getattr(where, "line", None) or self.lineno
        source = self.env.doc2path(self.env.docname)
        logger.error("%s", message, location=f"{source}:{line}", type="quiz")
        return []


class NumberQuizzes(SphinxTransform):
    """Number a page's questions and put the score behind the last."""

    default_priority = 500

    def apply(self, **kwargs: Any) -> None:  # noqa: ARG002
        """Set `number` and `count`."""
        questions = list(self.document.findall(quiz))
        for number, node in enumerate(questions, 1):
            node["number"], node["count"] = number, len(questions)
        if questions:
            last = questions[-1]
            last.parent.insert(last.parent.index(last) + 1, quiz_score(count=len(questions)))


def visit_quiz(self: HTML5Translator, node: quiz) -> None:
    """Open the fieldset."""
    self.body.append(f'<fieldset class="quiz" id="quiz-{node["number"]}">')
    node["option"] = 0


def depart_quiz(self: HTML5Translator, node: quiz) -> None:
    """Close it; without JavaScript the answer stands in a fold."""
    right = next(i for i, o in enumerate(node.findall(quiz_option)) if o["right"])
    self.body.append(
        '<details class="quiz-answer"><summary>Answer</summary>'
        f"<p>{chr(ord('A') + right)} is right.</p></details></fieldset>"
    )


def visit_legend(self: HTML5Translator, node: quiz_legend) -> None:
    """Write what is asked."""
    number, count = node.parent["number"], node.parent["count"]
    self.body.append(f'<legend><span class="quiz-number">Question {number} of {count}</span> ')


def depart_legend(self: HTML5Translator, node: quiz_legend) -> None:  # noqa: ARG001
    """Close it."""
    self.body.append("</legend>")


def visit_option(self: HTML5Translator, node: quiz_option) -> None:
    """Write the radio button and its label."""
    question = node.parent
    identity = f"quiz-{question['number']}-{question['option']}"
    letter = chr(ord("A") + question["option"])
    question["option"] += 1
    self.body.append(
        f'<div class="quiz-option" data-right="{str(node["right"]).lower()}">'
        f'<input type="radio" name="quiz-{question["number"]}" id="{identity}" autocomplete="off">'
        f'<label for="{identity}"><span class="quiz-letter">{letter}</span> <span>'
    )


def depart_option(self: HTML5Translator, node: quiz_option) -> None:  # noqa: ARG001
    """Close the label."""
    self.body.append('</span></label><span class="quiz-verdict"></span></div>')


def visit_explanation(self: HTML5Translator, node: quiz_explanation) -> None:  # noqa: ARG001
    """Open the explanation; folded without JavaScript, revealed by choosing with it."""
    self.body.append('<details class="quiz-explanation"><summary>Explanation</summary>')


def depart_explanation(self: HTML5Translator, node: quiz_explanation) -> None:  # noqa: ARG001
    """Close it."""
    self.body.append("</details>")


def visit_score(self: HTML5Translator, node: quiz_score) -> None:
    """Write the score line; it shows with JavaScript only."""
    self.body.append(
        '<div class="quiz-score" hidden><output role="status">'
        f"Answered 0/{node['count']} · Correct 0/{node['count']}</output>"
        '<button type="button">Reset answers</button></div>'
    )
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("quiz", Quiz)
    app.add_transform(NumberQuizzes)
    app.add_node(quiz, html=(visit_quiz, depart_quiz))
    app.add_node(quiz_legend, html=(visit_legend, depart_legend))
    app.add_node(quiz_option, html=(visit_option, depart_option))
    app.add_node(quiz_explanation, html=(visit_explanation, depart_explanation))
    app.add_node(quiz_score, html=(visit_score, None))
    static = [str(Path(__file__).with_suffix(end)) for end in (".css", ".js")]
    app.connect("builder-inited", lambda app: app.config.html_static_path.extend(static))
    app.add_css_file("quiz.css")
    app.add_js_file("quiz.js", loading_method="defer")
    return {"parallel_read_safe": True, "parallel_write_safe": True, "env_version": 1}
