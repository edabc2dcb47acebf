"""Run commands with wrong or unusual inputs, and tabulate exit code, time, files left behind and message.

    python -m benchmarks.bad_inputs                                  all rows
    python -m benchmarks.bad_inputs --only b_broken500 a_lr_flag     rows by name
    python -m benchmarks.bad_inputs --only a                         all rows of a part
    python -m benchmarks.bad_inputs --list                           names, nothing is run

Each row runs in an empty folder with links to the prepared data, models and reward functions. The expected
exit code and texts of the message are beside each row, as is the verdict of a person who read the message.
A row whose result differs from the expectation is marked in the table.

Commands are forked from a process that has imported the libraries; add 5 to 9 s of CPU time for rows that
load a model. --fresh, and rows about the environment, start Python anew. The tables of all parts whose rows
are all selected are written to benchmarks/bad_inputs/results.md.

Exit code: 0 if all results are as expected, 1 if a result differs, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bad_inputs import data, environment, first_day, folders, keys, models, rewards
from benchmarks.bad_inputs.materials import ensure
from benchmarks.bad_inputs.row import Row
from benchmarks.bad_inputs.service import Service
from tests import forks

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("results.md")
PARTS = {
    "a": ("Keys and values on the command line", keys.ROWS),
    "b": ("Data files", data.ROWS),
    "c": ("Model and tokenizer folders", models.ROWS),
    "d": ("Reward functions and services", rewards.ROWS),
    "e": ("Run folders and other commands", folders.ROWS),
    "f": ("Environment", environment.ROWS),
    "g": ("The first day", first_day.ROWS),
}
LIMIT_S = 180  # of one row
MEMORY_BYTES = 12 << 30  # address space of one process; a default Llama of 7B parameters exceeds the limit
FEW = 3  # up to this number of rows, starting Python anew takes less time than starting the server
CACHE = "artefacts"  # folder in `outputs` that is no run
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONDONTWRITEBYTECODE": "1",
    "COLUMNS": "100",
    "PYTHON": sys.executable,
}
REMOVED = ("HF_HUB_OFFLINE", "HYDRA_FULL_ERROR")  # variables that a user does not have


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a row."""

    row: Row
    code: int | None  # None: the time limit was exceeded
    seconds: float
    output: str
    left: tuple[str, ...]  # files left behind, relative to the folder of the row

    @property
    def traceback(self) -> bool:
        """Whether the output contains a Python traceback."""
        return "Traceback (most recent call last)" in self.output

    @property
    def message(self) -> str:
        """The error message, else the last line of the output."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        found = next((i for i, line in enumerate(lines) if line.startswith(("error:", "rank "))), None)
        found = len(lines) - 1 if found is None else found
        return " ".join(lines[found:])

    @property
    def differs(self) -> list[str]:
        """The differences between the result and the expectation of the row."""
        row, found = self.row, []
        if self.code is None:
            found.append(f"no end within {LIMIT_S} s")
        elif row.code is not None and self.code != row.code:
            found.append(f"exit code {self.code}, not {row.code}")
        text = " ".join(self.output.split())
        found += [f"no {part!r}" for part in row.says if " ".join(part.split()) not in text]
        found += [f"contains {part!r}" for part in row.never if part in text]
        if self.traceback and "Traceback" not in row.says:
            found.append("traceback")
        if self.left and not row.keeps:
            found.append(f"leaves {len(self.left)} files")
        return found


def main() -> None:
    """Run the selected rows, print their results, and write the page if all rows were selected."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks.bad_inputs", description=__doc__, formatter_class=form)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="names of rows, or letters of parts")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--fresh", action="store_true", help="start a fresh Python process for every row")
    parser.add_argument("--show", action="store_true", help="print the whole output of every row")
    parser.add_argument("--workers", type=int, default=2, help="rows in parallel (default: 2)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bad_inputs", help="working folder")
    arguments = parser.parse_args()
    rows = [row for _, rows in PARTS.values() for row in rows]
    if twice := [name for name, count in Counter(row.name for row in rows).items() if count > 1]:
        parser.error(f"two rows have the same name: {', '.join(twice)}")
    chosen = rows
    if arguments.only:
        if unknown := [name for name in arguments.only if name not in {*PARTS, *(row.name for row in rows)}]:
            parser.error(f"no such row: {', '.join(unknown)}; --list prints the names")
        chosen = [row for row in rows if {row.name, row.name[0]} & set(arguments.only)]
    if arguments.list:
        print("\n".join(f"{row.name:28}{row.input}" for row in chosen))
        return
    work = arguments.work.resolve()
    materials = ensure(work / "materials")
    fresh = arguments.fresh or len(chosen) <= FEW or not forks.SUPPORTED
    results = []
    with Service() as service, ThreadPoolExecutor(arguments.workers) as pool:
        jobs = [(row, work, materials, service.address, fresh or row.alone) for row in chosen]
        for result in pool.map(lambda job: carry_out(*job), jobs):
            results.append(result)
            print(line(result), flush=True)
            if arguments.show:
                print(result.output)
    different = [result for result in results if result.differs]
    print(f"\n{summary(chosen)}; {len(different)} differ from the expectation")
    for result in different:
        print(f"  {result.row.name}: {'; '.join(result.differs)}")
    if parts := [title for title, own in PARTS.values() if all(row in chosen for row in own)]:
        PAGE.write_text(page(results, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"written: {PAGE.relative_to(ROOT)} ({', '.join(parts)})")
    raise SystemExit(1 if different else 0)


def carry_out(row: Row, work: Path, materials: Path, service: str, fresh: bool) -> Result:
    """Run a row in a new folder.

    Args:
        row: the row.
        work: the working folder.
        materials: the folder with data, models and reward functions.
        service: the address of the HTTP server.
        fresh: start Python anew.
    """
    folder = work / "rows" / row.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in materials.iterdir():
        if path.name != "runs":
            (folder / path.name).symlink_to(path)
    if row.prepare is not None:
        row.prepare(folder)
    before = files(folder)
    made = sorted(path for path in (folder / "outputs").glob("*") if path.is_dir() and path.name != CACHE)
    runs = [str(path.relative_to(folder)) for path in made]
    fill = {"ARTEFACTS": str(work / "artefacts"), "SERVICE": service, "RUN": runs[0] if runs else "outputs"}
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    for name in REMOVED:
        environment.pop(name, None)
    for name, value in row.env.items():
        environment.pop(name, None) if value is None else environment.update({name: value})
    if row.shell:
        command = ["bash", "-c", filled(row.typed, fill)]
    else:
        command = [sys.executable, "-m", row.module, *(filled(word, fill) for word in row.words)]
    start = subprocess.Popen if fresh or row.shell else forks.Popen
    began = time.monotonic()
    process = start(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        output, code = process.communicate(timeout=LIMIT_S)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, code = process.communicate()[0], None
    seconds = time.monotonic() - began
    left = tuple(sorted(files(folder) - before))
    text = output.decode("utf-8", "replace").replace(str(folder), "<folder>").replace(str(ROOT), "<checkout>")
    text = text.replace(str(work), "<work>").replace(sys.base_prefix, "<python>")
    return Result(row, code, seconds, text, left)


def filled(text: str, values: dict[str, str]) -> str:
    """Replace each name of `values` in a text by its value."""
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def files(folder: Path) -> set[str]:
    """Return the files in a folder, without links to the materials and without caches of Python."""
    found = set()
    for path, names, files in os.walk(folder):
        names[:] = [name for name in names if name != "__pycache__"]
        found |= {str((Path(path) / name).relative_to(folder)) for name in files}
    return found


# -- output ----------------------------------------------------------------------------------------


def line(result: Result) -> str:
    """Return the line of the terminal about a result."""
    mark = "differs" if result.differs else result.row.verdict
    return (
        f"{result.row.name:28}{exit_text(result):>5} {result.seconds:5.1f} s  {mark:8} {result.message[:150]}"
    )


def exit_text(result: Result) -> str:
    """Return the exit code as the table shows it."""
    return "time" if result.code is None else str(result.code)


def left_text(result: Result) -> str:
    """Return what a command left behind, as the table shows it."""
    if any("/model/" in name or name.endswith("model.safetensors") for name in result.left):
        return "run"
    count = len(result.left)
    return f"{count} file{'s' if count > 1 else ''}" if count else ""


def summary(rows: Sequence[Row]) -> str:
    """Return the numbers of rows per verdict."""
    counts = Counter(row.verdict for row in rows)
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("good", "poor", "BAD"))
    return f"{len(rows)} rows: {verdicts}"


def page(results: Sequence[Result], before: str = "") -> str:
    """Return the Markdown page with a table for each part.

    Args:
        results: the results of all rows of some parts.
        before: the page with earlier results; the tables of other parts are taken from it.
    """
    sections = {text.partition("\n")[0]: text for text in before.split("\n## ")[1:]}
    ran = [result.row for result in results]
    for title, rows in PARTS.values():
        if all(row in ran for row in rows):
            sections[title] = "\n".join(table(title, [each for each in results if each.row in rows])) + "\n"
    parts = [sections[title].strip("\n") for title, _ in PARTS.values() if title in sections]
    return "\n\n## ".join(["\n".join(head()), *parts]) + "\n"


def head() -> Iterator[str]:
    """Yield the lines before the tables."""
    yield "# Bad inputs"
    yield ""
    yield "This page shows what the commands do with wrong and unusual inputs."
    yield "`python -m benchmarks.bad_inputs` runs all rows and writes the page (see its `--help`)."
    yield ""
    every = summary([row for _, rows in PARTS.values() for row in rows])
    yield f"{every}. Verdicts, of a person who read the whole output:"
    yield ""
    yield "- good: the command ends early with key, rule, value and a remedy, or does what the input means;"
    yield "- poor: the message comes late or lacks a remedy, or a warning is missing;"
    yield "- BAD: a traceback for a mistake of the user, a wrong result without a message, or lost work."
    yield ""
    yield "Seconds are measured in processes that have imported the libraries, two at a time. Rows of"
    yield "the last part, and rows with several commands, start Python anew. The column `left` shows the"
    yield "files that stay behind; `run` is a run with its model. Messages are cut after 300 characters."


def table(title: str, results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of the section of a part, without the mark of its title."""
    yield from (title, "", f"{summary([result.row for result in results])}.", "")
    yield "| input | exit | s | traceback | left | verdict | message |"
    yield "|---|--:|--:|---|---|---|---|"
    for result in results:
        notes = "; ".join(filter(None, [result.row.remark, *result.differs]))
        verdict = f"differs from {result.row.verdict}" if result.differs else result.row.verdict
        cells = [
            result.row.input,
            exit_text(result),
            f"{result.seconds:.1f}",
            "yes" if result.traceback else "",
            left_text(result),
            f"{verdict} ({notes})" if notes else verdict,
            f"`{code_cell(result.message)}`" if result.message else "",
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def code_cell(text: str) -> str:
    """Return a text that fits between backticks in a table cell."""
    text = " ".join(text.replace("`", "'").split())
    return text if len(text) <= 300 else f"{text[:300]}..."


if __name__ == "__main__":
    main()
