"""Results of the GPU tests: facts of stages, the file that contains them, and their table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf.core.files import whole

OK, FAILED, SKIPPED, FIGURE = "ok", "failed", "skipped", "figure"
RUNNING, INTERRUPTED = "running", "interrupted"  # states of a stage only
COLUMNS = ["stage, fact", "value", "limit", "result", "seconds"]


@dataclass(slots=True, kw_only=True)
class Fact:
    """One result of a stage. A figure has no limit and cannot fail."""

    name: str
    status: str  # OK, FAILED, SKIPPED or FIGURE
    value: float | str | None = None
    unit: str = ""
    limit: str = ""  # condition that the value must satisfy
    reason: str = ""  # why the fact failed or was skipped
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class StageResult:
    """The facts of one stage, and the state of the stage."""

    number: int
    title: str
    device: str
    started: str  # local time, ISO 8601
    limit_s: float
    seconds: float = 0.0
    status: str = RUNNING
    facts: list[Fact] = field(default_factory=list)

    def finish(self, seconds: float) -> None:
        """Set the duration and, unless the stage was interrupted, the status that follows from the facts."""
        self.seconds = seconds
        found = {fact.status for fact in self.facts}
        if self.status == RUNNING:
            self.status = FAILED if FAILED in found else OK if found - {SKIPPED} else SKIPPED


class Results:
    """The file of results, which is replaced atomically after every fact.

    Stages that are not run again keep their results, so several commands can fill one table.

    Args:
        file: the JSON file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.stages: dict[int, StageResult] = {}
        if file.exists():
            for entry in json.loads(file.read_text())["stages"]:
                facts = [Fact(**fact) for fact in entry.pop("facts")]
                self.stages[entry["number"]] = StageResult(**entry, facts=facts)

    def begin(self, stage: StageResult) -> None:
        """Replace the results of a stage."""
        self.stages[stage.number] = stage
        self.write()

    def write(self) -> None:
        """Write all results to the file."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        entries: list[dict[str, Any]] = [asdict(self.stages[number]) for number in sorted(self.stages)]
        with whole(self.file) as scratch:
            scratch.write_text(json.dumps({"stages": entries}, indent=1) + "\n")


def rows(stages: list[StageResult]) -> Iterator[list[str]]:
    """Yield the rows of the table: a row for each stage, followed by a row for each of its facts."""
    for stage in stages:
        title = f"{stage.number}. {stage.title}"
        yield [title, "", f"{stage.limit_s:.0f} s", stage.status.upper(), f"{stage.seconds:.1f}"]
        for fact in stage.facts:
            value = "" if fact.value is None else f"{shown(fact.value)} {fact.unit}".strip()
            result = f"{fact.status}: {fact.reason}" if fact.reason else fact.status
            yield [f"  {fact.name}", value, fact.limit, result, f"{fact.seconds:.1f}"]


def shown(value: float | str) -> str:
    """Return a value as text, numbers with three significant digits."""
    if isinstance(value, str) or float(value).is_integer():
        return str(value) if isinstance(value, str) else f"{value:.0f}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def counted(stages: list[StageResult]) -> str:
    """Return the numbers of facts by status as text."""
    found = [fact.status for stage in stages for fact in stage.facts]
    return ", ".join(f"{found.count(status)} {status}" for status in (OK, FAILED, SKIPPED, FIGURE))


def markdown(stages: list[StageResult]) -> str:
    """Return the table as Markdown."""
    from benchmarks.against_trl.table import Sheet

    escaped = [[cell.strip().replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows(stages)]
    return Sheet("", COLUMNS, escaped).markdown()


def show(stages: list[StageResult]) -> None:
    """Print the table to the terminal."""
    from rich.markup import escape

    from benchmarks.against_trl.table import Sheet

    devices = " and ".join(dict.fromkeys(stage.device for stage in stages))
    Sheet(f"GPU tests on {devices}", COLUMNS, [[escape(cell) for cell in row] for row in rows(stages)]).show()
    print(counted(stages))
