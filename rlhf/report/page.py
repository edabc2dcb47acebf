"""The HTML page of a report: one file that contains styles, figures and script, and loads no other file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rlhf.report.drawing import GLYPHS, SERIES, Chart
from rlhf.report.figures import charts, named
from rlhf.report.runs import duration, number
from rlhf.report.tables import differences, not_drawn, remarks, result, results, samples, settings

if TYPE_CHECKING:
    from rlhf.report.groups import Group, Section
    from rlhf.report.runs import FoundRuns, Run
    from rlhf.report.tables import Results, Sample, Settings

NAMES = 4  # largest number of algorithms in the title
_FOLDED = 8  # longer lists of runs and of commands are folded


@dataclass(frozen=True)
class Part:
    """The content of a section of the page.

    Attributes:
        section: the section of the report.
        suffix: end of the ids of the section; empty if the page has one section.
        results: table of final results.
        differences: differences between settings, as sentences.
        settings: settings that the groups share, and settings in which they differ.
        charts: figures.
        unseen: sentence about groups that are not drawn; may be empty.
        undrawn: remarks about metrics that are not drawn.
        samples: prompts with the responses of the groups.
    """

    section: Section
    suffix: str
    results: Results
    differences: list[str]
    settings: Settings
    charts: list[Chart]
    unseen: str
    undrawn: list[str]
    samples: list[Sample]

    def id(self, name: str) -> str:
        """Return the id of the element `name` of this section."""
        return f"{name}_{self.suffix}" if self.suffix else name


class Page:
    """The page of a report.

    Args:
        sections: the sections of the report.
        found: the runs of the report, damaged folders and skipped folders.
        count: number of prompts of each section for which the page shows completions.
        made: date of the report and version of rlhf.
    """

    def __init__(self, sections: Sequence[Section], found: FoundRuns, count: int, made: str) -> None:
        self.found = found
        self.made = made
        self.notes = remarks(sections, found)
        self.parts: list[Part] = []
        for section in sections:
            suffix = section.name if len(sections) > 1 else ""
            drawn, undrawn = charts(section)
            shown, unreadable = samples(section, count)
            self.notes += unreadable
            self.parts.append(
                Part(
                    section,
                    suffix,
                    results(section),
                    list(map(str, differences(section))),
                    settings(section),
                    [named(chart, suffix) for chart in drawn],
                    not_drawn(section),
                    undrawn,
                    shown,
                )
            )

    @cached_property
    def charts(self) -> list[Chart]:
        """The figures of all sections."""
        return [chart for part in self.parts for chart in part.charts]

    def html(self) -> str:
        """Return the page as HTML."""
        runs = self.found.runs
        environment = Environment(autoescape=True, undefined=StrictUndefined)
        environment.globals |= {
            "colour": colour,
            "glyph": glyph,
            "summary": summary,
            "judgement": judgement,
            "markup": Markup,
            "result": result,
            "duration": duration,
            "number": number,
        }
        return environment.from_string(resource("page.html")).render(
            title=heading(runs),
            subtitle=subtitle(runs),
            made=self.made,
            notes=self.notes,
            parts=self.parts,
            empty=[run for run in runs if not run.rows],
            broken=self.found.broken,
            left_out=self.found.left_out,
            count=len(runs) + len(self.found.broken),
            folded=_FOLDED,
            commands=Counter((run.command, run.commit) for run in runs),
            css=Markup(resource("page.css")),
            script=Markup(resource("page.js")),
        )


def resource(name: str) -> str:
    """Return the text of the file `name` in the folder of this module."""
    return files("rlhf.report").joinpath(name).read_text(encoding="utf-8")


def heading(runs: Sequence[Run]) -> str:
    """Return the title of the page: algorithms and data set, or the number of runs if there are many."""
    names = distinct(run.config["algo.name"] for run in runs)
    tasks = distinct(run.config["task.name"] for run in runs)
    if len(tasks) > 1 or len(names) > NAMES:
        return f"Report of {len(runs)} runs"
    return f"{', '.join(names)} on {tasks[0]}"


def subtitle(runs: Sequence[Run]) -> str:
    """Return the subtitle of the page: number of runs by status."""
    statuses = [run.outcome for run in runs]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in distinct(statuses))
    return f"{len(runs)} run{'s' * (len(runs) != 1)} ({counts})"


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return each value once, in order of first appearance."""
    return list(dict.fromkeys(values))


def colour(group: Group) -> str:
    """Return the colour of a group as a CSS value; grey for a group that is not drawn."""
    return "var(--rule)" if group.place is None else f"var(--series-{group.place % len(SERIES)})"


def glyph(group: Group) -> str:
    """Return the marker of a group as a character."""
    return GLYPHS[0 if group.place is None else group.place % len(GLYPHS)]


def summary(prompt: str) -> str:
    """Return the TITLE line of a prompt, else its first line, truncated to 160 characters."""
    lines = [line for line in prompt.splitlines() if line.strip()]
    title = next((line for line in lines if line.startswith("TITLE:")), lines[0] if lines else "(empty)")
    return title[:160]


def judgement(row: dict[str, Any], reference: float | None) -> list[str]:
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
