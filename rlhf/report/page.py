"""The page of a report: one file of HTML with its styles, figures and script in it, which loads nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from rlhf.report.figures import SERIES
from rlhf.report.groups import common

if TYPE_CHECKING:
    from rlhf.report.figures import Chart
    from rlhf.report.groups import Group
    from rlhf.report.runs import Run
    from rlhf.report.samples import Sample
    from rlhf.report.table import Cell, Results


# Nothing from outside, whatever a completion or a label may hold.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(
    groups: Sequence[Group],
    found: Results,
    charts: Sequence[Chart],
    chosen: Sequence[Sample],
    notes: Sequence[str],
    left_out: Sequence[str],
    made: str,
) -> str:
    """The page as HTML.

    Args:
        notes: what a reader has to know first.
        left_out: folders that were found and not read, with the reason.
        made: when and by what.
    """
    runs = [run for group in groups for run in group.runs]
    parts = [("results", "Final results", results_table(found))]
    parts += [(chart.name, chart.title, chart_figure(chart)) for chart in charts]
    if chosen:
        parts.append(("completions", "Completions of the same prompts", completions(chosen)))
    parts.append(("runs", "Runs", runs_table(groups, left_out)))
    parts.append(("commands", "Commands", commands(runs)))
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in parts)
    body = "".join(
        f'<section id="{name}"><h2>{escape(title)}</h2>{content}</section>' for name, title, content in parts
    )
    title = heading(groups)
    resource = files("rlhf.report").joinpath
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>
{resource("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="faint">{escape(subtitle(runs))}</p>
<p class="faint">{escape(made)}</p>
{noted(notes)}
<nav>{links}</nav>
{body}
</main>
<script>
{resource("page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def heading(groups: Sequence[Group]) -> str:
    """What is compared."""
    names = distinct(run.config["algo.name"] for group in groups for run in group.runs)
    tasks = distinct(run.config["task.name"] for group in groups for run in group.runs)
    return f"{', '.join(names)} on {', '.join(tasks)}"


def subtitle(runs: Sequence[Run]) -> str:
    """How many runs of which kind, and what they share."""
    statuses = [run.status for run in runs]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in distinct(statuses))
    shared = [f"{group} {name}" for group, name in common(runs).items() if group not in ("algo", "task")]
    return " · ".join([f"{len(runs)} run{'s' * (len(runs) > 1)} ({counts})", *shared])


def noted(notes: Sequence[str]) -> str:
    """The notes above everything."""
    return f'<div class="notes">{"".join(f"<p>{escape(note)}</p>" for note in notes)}</div>' if notes else ""


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, in order."""
    return list(dict.fromkeys(values))


def colour(group: Group) -> str:
    """The style that gives an element the colour of `group`."""
    return f"--dot: var(--series-{group.place % len(SERIES)})"


def named(group: Group) -> str:
    """A cell with the label of `group`, and a dot in its colour."""
    dot = f'<span class="dot" style="{colour(group)}"></span>'
    return f'<td class="text label">{dot}{escape(group.label)}</td>'


def results_table(found: Results) -> str:
    """Means and deviations over seeds."""
    columns = "".join(f'<th scope="col"><button>{escape(name)}</button></th>' for name in found.columns)
    rows = []
    for group, cells in found.rows:
        partial = "" if group.finished else " partial"
        figures = "".join(map(result_cell, cells))
        rows.append(
            f'<tr class="series series-{group.index}{partial}">{named(group)}'
            f'<td class="text">{escape(group.seeds)}</td>{figures}</tr>'
        )
    caption = (
        "Last evaluation, mean ± standard deviation over the seeds that are finished (in italics: of "
        "a run that is not); below it, before training. “updates, s” is the time of all updates, "
        "without loading and evaluation; “episodes/s” the responses trained on in a second of it. "
        "Headings sort."
    )
    return (
        f'<div class="wide"><table><caption>{caption}</caption><thead><tr>'
        f'<th class="text" scope="col">setting</th><th class="text" scope="col">seeds</th>{columns}'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def result_cell(cell: Cell | None) -> str:
    """A figure after training, and before it."""
    if cell is None:
        return "<td></td>"
    before = "" if cell.before is None else f"<small>from {cell.before:.{cell.decimals}f}</small>"
    return f'<td data-value="{cell.after!r}">{escape(cell.final)}{before}</td>'


def chart_figure(chart: Chart) -> str:
    """A figure and what it says."""
    return (
        f'<figure role="img" aria-label="{escape(chart.title)}">{chart.svg()}'
        f"<figcaption>{escape(chart.caption)}</figcaption></figure>"
    )


def completions(chosen: Sequence[Sample]) -> str:
    """Prompt by prompt, the answers side by side."""
    lead = (
        "Near-greedy responses to held-out prompts at the last evaluation, of the lowest seed of "
        "each setting. “gold” is the judge that training never sees, “score” what training sees; "
        "won, tied or lost is against the reference response, by gold."
    )
    cards = "".join(sample_cards(sample, opened=i == 0) for i, sample in enumerate(chosen))
    return f'<p class="faint">{lead}</p>{cards}'


def sample_cards(sample: Sample, opened: bool) -> str:
    """One prompt: the reference response, the answer before training, the answers after it."""
    reference = sample.reference_score
    cards = [card("reference response", sample.reference, judged({"gold_score": reference}, None))]
    if sample.before is not None:
        cards.append(card("before training", sample.before["response"], judged(sample.before, reference)))
    for answer in sample.answers:
        name = f"{answer.group.label} · seed {answer.run.seed} · update {answer.row['update']}"
        told = judged(answer.row, reference)
        cards.append(card(name, answer.row["response"], told, colour(answer.group)))
    lines = [line for line in sample.prompt.splitlines() if line.strip()]
    title = next((line for line in lines if line.startswith("TITLE:")), lines[0] if lines else "(empty)")
    return (
        f"<details{' open' * opened}><summary>{escape(title[:160])}</summary><div class='sample'>"
        f'<pre>{escape(sample.prompt)}</pre><div class="cards">{"".join(cards)}</div></div></details>'
    )


def card(name: str, text: str, told: str, style: str = "") -> str:
    """A response in a box."""
    shown = escape(text.strip() or "(empty)")
    return f'<div class="card" style="{style}"><h3>{escape(name)}</h3><p>{shown}</p>{told}</div>'


def judged(row: dict[str, Any], reference: float | None) -> str:
    """The scores of a response, and whether it wins against the reference response."""
    gold, score = row.get("gold_score"), row.get("score")
    words = []
    if gold is not None:
        words.append(f"gold {gold:.2f}")
    if gold is not None and reference is not None:
        verdict = "won" if gold > reference else "lost" if gold < reference else "tied"
        words.append(f'<span class="{verdict}">{verdict}</span>')
    if score is not None:
        words.append(f"score {score:.2f}")
    return f'<p class="faint">{" · ".join(words)}</p>' if words else ""


def runs_table(groups: Sequence[Group], left_out: Sequence[str]) -> str:
    """Every run: how far it came, with which code, on what; and the folders that were not read."""
    rows = []
    for group in groups:
        for run in group.runs:
            cells = [
                str(run.seed),
                f'<span class="{run.status}">{escape(run.progress)}</span>',
                f"<code>{escape(run.commit)}</code>",
                escape(run.hardware),
                f"<code>{escape(str(run.folder))}</code>",
            ]
            told = "".join(f'<td class="text">{cell}</td>' for cell in cells)
            rows.append(f"<tr>{named(group)}{told}</tr>")
    headings = ("setting", "seed", "status", "commit", "on", "folder")
    columns = "".join(f'<th class="text" scope="col">{name}</th>' for name in headings)
    table = f"<table><thead><tr>{columns}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    left = f'<p class="faint">Left out: {escape("; ".join(left_out))}.</p>' if left_out else ""
    return f'<div class="wide small">{table}</div>{left}'


def commands(runs: Sequence[Run]) -> str:
    """What was typed, each command once."""
    made = Counter((run.command, run.commit) for run in runs)
    return "".join(
        f'<div class="command"><code>{escape(command)}</code>'
        f'<p class="faint">{count} run{"s" * (count > 1)}, commit <code>{escape(commit)}</code></p></div>'
        for (command, commit), count in made.items()
    )
