"""Serves the icons in use, as CSS, in place of the theme's script of 1.5 MB that holds them all."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pydata_sphinx_theme
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

TAG = re.compile(r"\s*<script[^>]*fontawesome\.js[^>]*></script>")
# Written after the pages: a digest in their address is that of an earlier build.
LATE = re.compile(r"((?:icons|mystnb\.[0-9a-f]+)\.css)\?v=[0-9a-f]+")
CLASS = re.compile(r"\bfa-([a-z0-9-]+)")
STYLES = {"solid", "regular", "brands", "lg", "fw", "sm", "xs", "xl", "spin"}
NOTICE = (
    "/* Icons: Font Awesome Free by @fontawesome, https://fontawesome.com, CC BY 4.0. */\n"
    '[class*="fa-"] { display: inline-block; width: 1em; height: 1em; vertical-align: -.125em;'
    " background: currentColor; mask: var(--icon) center / contain no-repeat; }\n"
)


def definition(source: str, name: str) -> tuple[int, int, str]:
    """Return width, height and path of an icon from the theme's script.

    Raises
    ------
    ExtensionError
        If the script has no icon of that name.
    """
    # name:[width,height,[aliases],"code point",path]; a path of two tones is a list.
    pattern = (
        rf'[{{,]"?{re.escape(name)}"?:\[(\d+),(\d+),\[[^\]]*\],"[0-9a-f]+",'
        r'("[^"]+"|\[[^\]]+\])\]'
    )
    # The solid set is the largest and comes with every name that the theme uses.
    found = re.findall(pattern, source)
    if not found:
        raise ExtensionError(f"no icon named {name!r} in fontawesome.js")
    width, height, path = found[-1]
    paths = json.loads(path)
    return int(width), int(height), paths if isinstance(paths, str) else "".join(paths)


def style(source: str, name: str) -> str:
    """Return the CSS rule that shows an icon."""
    width, height, path = definition(source, name)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
        f'<path d="{path}"/></svg>'
    )
    return f'.fa-{name} {{ --icon: url("data:image/svg+xml,{quote(svg, safe=" /:=")}"); }}\n'


def replace_script(app: Sphinx, exception: Exception | None) -> None:
    """Drop the script from every page; write the rules for the icons that pages and theme name."""
    if exception or app.builder.format != "html":
        return
    out = Path(app.outdir)
    theme = Path(pydata_sphinx_theme.__file__).parent / "theme/pydata_sphinx_theme/static"
    source = (theme / "scripts/fontawesome.js").read_text(encoding="utf-8")
    names: set[str] = set()
    for page in sorted(out.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        names |= set(CLASS.findall(text)) - STYLES
        bare = LATE.sub(r"\1", TAG.sub("", text))
        if bare != text:
            _write(page, bare)
    rules = "".join(style(source, name) for name in sorted(names))
    _write(out / "_static/icons.css", NOTICE + rules)
    for pattern in ("_static/**/*.map", "_static/scripts/fontawesome*"):
        for heavy in out.glob(pattern):
            heavy.unlink()


def _write(path: Path, text: str) -> None:
    draft = path.with_suffix(".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.connect("build-finished", replace_script)
    app.add_css_file("icons.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
