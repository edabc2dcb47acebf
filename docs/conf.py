"""The site of the documentation: `make docs` writes static pages to build/site, without running anything.

The source folder is the root of the repository, so that links between the docs, the studies and other files
are the same on the site and in the checkout. `NAVIGATION` is the sidebar; a page that it lacks is an error, as
is a dead link.
"""

from __future__ import annotations

import os
from pathlib import Path

from docutils import nodes

ROOT = Path(__file__).parents[1]
NAVIGATION = {  # caption -> pages, without their suffix
    "Guide": [
        *("docs/start", "docs/data-model-reward", "docs/algorithms", "docs/asynchrony", "docs/hardware"),
        *("docs/runs", "docs/environments", "docs/studies", "docs/python", "docs/recipes"),
    ],
    "Results": [
        *("docs/results", "docs/results/benchmarks", "docs/results/comparison"),
        *("docs/results/off_policy", "docs/results/distillation", "studies/*/page"),
    ],
    "Reference": ["docs/reference/*", "docs/notebook"],
    "Development": [
        *("docs/architecture", "docs/internals", "CONTRIBUTING", "CHANGELOG", "tests/faults/results"),
        *("benchmarks/*/results", "studies/*/tables/tables"),
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
html_static_path = ["site.css"]
html_css_files = ["site.css"]


def add_navigation(app, name: str, source: list[str]) -> None:
    """Append the sidebar to the first page, where a checkout shows no directive."""
    if name == root_doc:
        for caption, pages in NAVIGATION.items():
            listed = "\n".join(f"/{page}" for page in pages)
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{listed}\n```\n"


def add_description(app, name: str, template: str, context: dict, doctree) -> None:
    """Give a page its first paragraph as the description that search engines show."""
    first = next(iter(doctree.findall(nodes.paragraph)), None) if doctree is not None else None
    if first is not None:
        text = " ".join(first.astext().split()).replace('"', "'")
        context["metatags"] = context.get("metatags", "") + f'<meta name="description" content="{text}">\n'


def add_entrance(app, error) -> None:
    """Let the root of the folder lead to the first page."""
    if error is None:
        refresh = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
        (Path(app.outdir) / "index.html").write_text(f"<!doctype html><title>rlhf</title>{refresh}\n")


def setup(app) -> None:
    """Connect the functions above."""
    app.connect("source-read", add_navigation)
    app.connect("html-page-context", add_description)
    app.connect("build-finished", add_entrance)
