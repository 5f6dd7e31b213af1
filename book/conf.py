"""Sphinx configuration of the book."""

import sys
from pathlib import Path

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
    "mathml",
    "quiz",
]
exclude_patterns = ["_build"]
nitpicky = True

# Pages run from the cache unless they, the package or the pinned versions have changed.
nb_execution_mode = "cache"
nb_execution_timeout = 300
nb_output_stderr = "error"
nb_merge_streams = True
execution_depends = ["ppo_demo/**/*", "constraints.txt"]

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath", "smartquotes"]
myst_heading_anchors = 3
math_eqref_format = "({number})"

bibtex_bibfiles = ["references.bib"]
bibtex_reference_style = "author_year"

html_theme = "sphinx_book_theme"
html_title = project
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["book.css"]
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
