"""Sphinx configuration of the book."""

import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

import ppo_demo

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "PPO for RLHF, executed"
author = "The ppo-demo contributors"
copyright = "the ppo-demo contributors. Text CC BY 4.0, code MIT"
version = release = ppo_demo.__version__
language = "en-GB"

extensions = [
    "myst_nb",
    "sphinxcontrib.bibtex",
    "execution",
    "icons",
    "listing",
    "mathml",
    "quiz",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
nitpicky = True

# Pages run from the cache unless they, what they import or the pinned versions have changed.
nb_execution_mode = "cache"
nb_execution_timeout = 300
nb_output_stderr = "error"
nb_merge_streams = True
execution_depends = ["constraints.txt"]

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath", "smartquotes"]
myst_heading_anchors = 3
math_eqref_format = "({number})"

bibtex_bibfiles = ["references.bib"]
bibtex_reference_style = "author_year"

numfig = True  # equations are numbered by page, so that a number says where to look
numfig_secnum_depth = 1

html_theme = "sphinx_book_theme"
html_title = project
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_favicon = "_static/favicon.svg"
html_sidebars = {"**": ["site-title.html", "search-button-field.html", "sbt-sidebar-nav.html"]}
html_copy_source = False
html_show_sourcelink = False
html_last_updated_fmt = None
html_context = {"default_mode": "auto"}
html_theme_options = {
    "navbar_persistent": [],  # the search button is in the side bar
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "extra_footer": "",
}


def visit_citation(self: HTML5Translator, node: nodes.citation) -> None:
    """Write an entry of the bibliography; docutils gives it a role that is deprecated."""
    HTML5Translator.visit_citation(self, node)
    self.body[-1] = self.body[-1].replace("doc-biblioentry", "listitem")


def setup(app: Sphinx) -> None:
    """Mend what the theme and docutils leave inaccessible."""
    visitors = (visit_citation, HTML5Translator.depart_citation)
    app.add_node(nodes.citation, override=True, html=visitors)
