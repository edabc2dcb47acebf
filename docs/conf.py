"""The site of the documentation: `make docs` writes static pages to build/site, without running anything.

The source folder is the root of the repository, so that links between docs, studies and other files are the
same on the site and in the checkout. `NAVIGATION` is the sidebar. A page that it lacks is an error, as is a
dead link.
"""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes

NAVIGATION = {  # caption -> pages without their suffix, some with a shorter title
    "Guide": [
        *("Start </docs/start>", "Your data, model, reward </docs/data-model-reward>"),
        *("Algorithms </docs/algorithms>", "Asynchrony </docs/asynchrony>", "More hardware </docs/hardware>"),
        *("Runs </docs/runs>", "Environments </docs/environments>", "Studies </docs/studies>"),
        "Is my trainer right? </docs/audit>",
        *("Python and extending </docs/python>", "Notebook </docs/notebook>", "/docs/recipes"),
    ],
    "Results": [
        *("Results </docs/results>", "Speed </docs/results/benchmarks>"),
        *("Comparison </docs/results/comparison>", "/docs/results/off_policy"),
        *("/docs/results/distillation", "/docs/results/overoptimization", "/studies/*/page"),
    ],
    "Reference": ["/docs/reference/*"],
    "Development": [
        *("/docs/architecture", "Internals </docs/internals>", "/CONTRIBUTING", "/CHANGELOG"),
        *("/tests/faults/results", "/benchmarks/*/results", "/studies/*/tables/tables"),
    ],
}

project = "rlhf"
author = "The authors of rlhf"
extensions = ["myst_nb", "sphinx_copybutton"]  # myst_nb reads Markdown and shows the notebook
root_doc = "docs/index"
include_patterns = [
    *("docs/**.md", "docs/*.ipynb", "studies/*/page.md", "studies/*/tables/tables.md", "CONTRIBUTING.md"),
    *("CHANGELOG.md", "tests/faults/results.md", "benchmarks/*/results.md"),
]
nb_execution_mode = "off"  # the notebook has its outputs (python -m tests.docs.notebook)
nb_number_source_lines = False
myst_enable_extensions = ["strikethrough"]
myst_heading_anchors = 4  # the anchors that GitHub gives
highlight_language = "none"
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"

html_theme = "furo"
html_title = "rlhf"
html_baseurl = os.environ.get("SITE_URL", "")  # the address of the published folder, for canonical links
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]


def add_navigation(app: Any, name: str, source: list[str]) -> None:
    """Append the sidebar to the first page, where a checkout shows no directive."""
    if name == root_doc:
        for caption, pages in NAVIGATION.items():
            listed = "\n".join(pages)
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{listed}\n```\n"


def add_description(app: Any, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give a page its first paragraph as the description that search engines show."""
    first = next(iter(doctree.findall(nodes.paragraph)), None) if doctree is not None else None
    if first is not None:
        text = escape(" ".join(first.astext().split()))
        context["metatags"] = context.get("metatags", "") + f'<meta name="description" content="{text}">\n'


def add_entrance(app: Any, error: Exception | None) -> None:
    """Let the root of the folder lead to the first page."""
    if error is None:
        refresh = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
        (Path(app.outdir) / "index.html").write_text(f"<!doctype html><title>rlhf</title>{refresh}\n")


def setup(app: Any) -> None:
    """Connect the functions above."""
    app.connect("source-read", add_navigation)
    app.connect("html-page-context", add_description)
    app.connect("build-finished", add_entrance)
