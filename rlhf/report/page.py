"""The HTML page of a report: one file that contains styles, figures and script, and loads no other file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rlhf.report.drawing import SERIES
from rlhf.report.groups import common

if TYPE_CHECKING:
    from rlhf.report.drawing import Chart
    from rlhf.report.groups import Group
    from rlhf.report.runs import Run
    from rlhf.report.samples import Sample
    from rlhf.report.table import Results


def page(
    groups: Sequence[Group],
    results: Results,
    charts: Sequence[Chart],
    samples: Sequence[Sample],
    notes: Sequence[str],
    left_out: Sequence[str],
    made: str,
) -> str:
    """Return the page as HTML.

    Args:
        groups: groups of runs.
        results: table of final results.
        charts: figures; each figure is a section of the page.
        samples: prompts with the responses of the groups; if empty, the page has no section of completions.
        notes: remarks shown at the top.
        left_out: folders that were skipped, each with the reason.
        made: date of the report and version of rlhf.
    """
    runs = [run for group in groups for run in group.runs]
    sections = {
        "results": "Final results",
        **{chart.name: chart.title for chart in charts},
        **({"completions": "Completions of the same prompts"} if samples else {}),
        "runs": "Runs",
        "commands": "Commands",
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.globals |= {"dot": dot, "summary": summary, "judgement": judgement, "markup": Markup}
    return environment.from_string(resource("page.html")).render(
        title=heading(runs),
        subtitle=subtitle(runs),
        made=made,
        notes=notes,
        sections=sections,
        results=results,
        charts={chart.name: chart for chart in charts},
        samples=samples,
        groups=groups,
        left_out=left_out,
        commands=Counter((run.command, run.commit) for run in runs),
        css=Markup(resource("page.css")),
        script=Markup(resource("page.js")),
    )


def resource(name: str) -> str:
    """Return the text of the file `name` in the folder of this module."""
    return files("rlhf.report").joinpath(name).read_text(encoding="utf-8")


def heading(runs: Sequence[Run]) -> str:
    """Return the title of the page: the algorithms and tasks of the runs."""
    names = distinct(run.config["algo.name"] for run in runs)
    tasks = distinct(run.config["task.name"] for run in runs)
    return f"{', '.join(names)} on {', '.join(tasks)}"


def subtitle(runs: Sequence[Run]) -> str:
    """Return the subtitle of the page: number of runs by status, and options that all runs share."""
    statuses = [run.status for run in runs]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in distinct(statuses))
    shared = [f"{group} {name}" for group, name in common(runs).items() if group not in ("algo", "task")]
    return " · ".join([f"{len(runs)} run{'s' * (len(runs) > 1)} ({counts})", *shared])


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return each value once, in order of first appearance."""
    return list(dict.fromkeys(values))


def dot(group: Group) -> str:
    """Return the CSS declaration that gives an element the colour of `group`."""
    return f"--dot: var(--series-{group.place % len(SERIES)})"


def summary(prompt: str) -> str:
    """Return the TITLE line of a prompt, else its first line, truncated to 160 characters."""
    lines = [line for line in prompt.splitlines() if line.strip()]
    title = next((line for line in lines if line.startswith("TITLE:")), lines[0] if lines else "(empty)")
    return title[:160]


def judgement(row: dict[str, Any], reference: float | None) -> list[str]:
    """Return the scores of a response, with "won", "tied" or "lost" against the reference response.

    Args:
        row: row of completions.jsonl, with `gold_score` and `score` where they were computed.
        reference: gold score of the reference response; None if there is no comparison.
    """
    gold, score = row.get("gold_score"), row.get("score")
    parts = []
    if gold is not None:
        parts.append(f"gold {gold:.2f}")
    if gold is not None and reference is not None:
        parts.append("won" if gold > reference else "lost" if gold < reference else "tied")
    if score is not None:
        parts.append(f"score {score:.2f}")
    return parts
