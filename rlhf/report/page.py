"""The HTML page of a report: one file that contains styles, figures and script, and loads no other file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rlhf.report.drawing import GLYPHS, SERIES, Chart
from rlhf.report.figures import charts
from rlhf.report.runs import duration, number
from rlhf.report.tables import differences, not_drawn, remarks, result, results, samples, settings

if TYPE_CHECKING:
    from rlhf.report.groups import Group, Section
    from rlhf.report.runs import FoundRuns

_NAMES = 4  # largest number of algorithms in the title
_FOLDED = 8  # longer lists of runs and of commands are folded


def write(sections: Sequence[Section], found: FoundRuns, count: int, made: str) -> tuple[str, list[Chart]]:
    """Return the page of a report as HTML, and its figures.

    Args:
        sections: the sections of the report.
        found: the runs of the report, damaged folders and skipped folders.
        count: number of prompts of each section for which the page shows completions.
        made: date of the report and version of rlhf.
    """
    runs, notes = found.runs, remarks(sections, found)
    parts: list[dict[str, Any]] = []
    for section in sections:
        end = f"_{section.name}" if len(sections) > 1 else ""  # of the ids of the section
        drawn, undrawn = charts(section)
        shown, unreadable = samples(section, count)
        notes += unreadable
        parts.append(
            {
                "section": section,
                "end": end,
                "results": results(section),
                "differences": differences(section),
                "settings": settings(section),
                "charts": [replace(chart, name=f"{chart.name}{end}") for chart in drawn],
                "unseen": not_drawn(section),
                "undrawn": undrawn,
                "samples": shown,
            }
        )
    names, tasks = (
        list(dict.fromkeys(run.config[key] for run in runs)) for key in ("algo.name", "task.name")
    )
    outcomes = Counter(run.outcome for run in runs)  # in the order of their first runs
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    functions = (_colour, _glyph, _summary, _judgement, result, duration, number)
    environment.globals |= {each.__name__.strip("_"): each for each in functions} | {"markup": Markup}
    page, css, script = (
        files("rlhf.report").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
    )
    html = environment.from_string(page).render(
        title=f"Report of {len(runs)} runs"
        if len(tasks) > 1 or len(names) > _NAMES
        else f"{', '.join(names)} on {next(iter(tasks))}",
        subtitle=f"{len(runs)} run{'s' * (len(runs) != 1)} "
        f"({', '.join(f'{count} {outcome}' for outcome, count in outcomes.items())})",
        made=made,
        notes=notes,
        parts=parts,
        empty=[run for run in runs if not run.rows],
        broken=found.broken,
        left_out=found.left_out,
        count=len(runs) + len(found.broken),
        folded=_FOLDED,
        commands=Counter((run.command, run.commit) for run in runs),
        css=Markup(css),
        script=Markup(script),
    )
    return html, [chart for part in parts for chart in part["charts"]]


def _colour(group: Group) -> str:
    """Return the colour of a group as a CSS value; grey for a group that is not drawn."""
    return "var(--rule)" if group.place is None else f"var(--series-{group.place % len(SERIES)})"


def _glyph(group: Group) -> str:
    """Return the marker of a group as a character."""
    return GLYPHS[0 if group.place is None else group.place % len(GLYPHS)]


def _summary(prompt: str) -> str:
    """Return the TITLE line of a prompt, else its first line, truncated to 160 characters."""
    lines = [line for line in prompt.splitlines() if line.strip()]
    title = next((line for line in lines if line.startswith("TITLE:")), lines[0] if lines else "(empty)")
    return title[:160]


def _judgement(row: dict[str, Any], reference: float | None) -> list[str]:
    """Return the scores of a response, with "won", "tied" or "lost" against the reference response.

    Args:
        row: row of completions.jsonl, with `gold_score` and `score` where they were computed.
        reference: judge score of the reference response; None if there is no comparison.
    """
    gold, score = row.get("gold_score"), row.get("score")
    parts = []
    if gold is not None:
        parts.append(f"judge {number(gold, 2)}")
    if gold is not None and reference is not None:
        parts.append("won" if gold > reference else "lost" if gold < reference else "tied")
    if score is not None:
        parts.append(f"reward {number(score, 2)}")
    return parts
