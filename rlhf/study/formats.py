"""Tables of a study as Markdown, LaTeX, CSV, and lines of a terminal."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence

from rlhf.core.statistics import detectable, p_sign_flip, seeds_needed
from rlhf.study.tables import MARGIN, Family, Shown

_WIDTH = 80  # columns of the terminal
_INTERVAL = re.compile(r" \((-?[\d.]+), (-?[\d.]+)\)")


def as_table(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table; the first `left` columns are aligned left, the others right."""
    rule = ["---" if place < left else "--:" for place in range(len(lines[0]))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def as_latex(table: Shown) -> str:
    """Return a table for LaTeX with the package booktabs."""
    head, *body = [" & ".join(map(_in_latex, line)) + r" \\" for line in table.lines]
    begin = r"\begin{tabular}{l" + "r" * len(table.columns) + "}"
    lines = [
        f"% {table.task}",
        begin,
        r"\toprule",
        head,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _in_latex(text: str) -> str:
    text = re.sub(r"([&%$#_])", r"\\\1", text.replace("\\*", "*")).replace("*", "$^*$")
    text = re.sub(r"`([^`]*)`", r"\\texttt{\1}", text)
    text = _INTERVAL.sub(r" {\\scriptsize [$\1$, $\2$]}", text)
    return re.sub(r"(?<![\w$.-])(-[\d.]+)", r"$\1$", text)


def tables_csv(tables: Sequence[Shown]) -> str:
    """Return tables as CSV, one line per task, method and column."""
    lines = [
        [each.table.quantity, each.task, method, column, *entry.estimate[:3], *entry[2:]]
        for each in tables
        for method, row in each.rows.items()
        for column, entry in zip(each.columns, row, strict=True)
        if entry.runs
    ]
    names = ["centre", "low", "high", "seeds", "runs", "collapsed"]
    return _csv([["quantity", "task", "method", "column", *names], *lines])


def tests_csv(found: Sequence[Family]) -> str:
    """Return the tests as CSV: estimates, p-values, verdicts, and what the seeds could detect."""
    lines: list[Sequence[object]] = []
    for task, column, what, family in found:
        for each in family:
            c = each.contrast
            exact = p_sign_flip(c.values) if c.paired else ""
            least, needed = detectable(c.sd, c.seeds), seeds_needed(MARGIN, c.sd)
            numbers = [*c.estimate[:3], each.p, each.holm, exact, each.verdict, least, needed]
            lines.append([task, column, what, " = ".join(each.names), *numbers])
    names = [
        "mean",
        "low",
        "high",
        "p",
        "p_holm",
        "p_exact",
        "verdict",
        "detectable",
        f"seeds_for_{MARGIN:g}",
    ]
    return _csv([["task", "column", "test", "name", *names], *lines])


def _csv(lines: Sequence[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


def for_terminal(table: Shown) -> Iterator[str]:
    """Yield the lines of a table, at most `_WIDTH` columns wide; intervals as half of their width."""
    texts = [["", *table.columns]]
    for method, row in table.rows.items():
        texts.append([method])
        for entry in row:
            half = f"\N{PLUS-MINUS SIGN}{(entry.estimate.high - entry.estimate.low) / 2:.3f}"
            texts[-1].append(_INTERVAL.sub(half, entry.text).replace(" \\*", "*"))
    first = max(len(line[0]) for line in texts)
    wide = max(len(text) for line in texts for text in line[1:])
    count = max(1, (_WIDTH - first) // (wide + 2))
    yield f"{table.task}: {table.title}"
    for start in range(1, len(texts[0]), count):
        for line in texts:
            yield f"{line[0]:{first}}" + "".join(f"  {text:>{wide}}" for text in line[start : start + count])
