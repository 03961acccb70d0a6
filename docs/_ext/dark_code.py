"""A second style of code, for ``prefers-color-scheme: dark``; Sphinx only writes one."""

from pathlib import Path

from pygments.formatters import HtmlFormatter
from sphinx.application import Sphinx

FILE = "pygments_dark.css"


def write_style(app: Sphinx, error: Exception | None) -> None:
    """Write the style sheet next to Sphinx's own."""
    if error is None and app.builder.format == "html":
        style = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
        (Path(app.outdir) / "_static" / FILE).write_text(style, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the style sheet (Sphinx entry point)."""
    app.add_css_file(FILE, media="(prefers-color-scheme: dark)")
    app.connect("build-finished", write_style)
    return {"parallel_read_safe": True}
