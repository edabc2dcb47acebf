"""Inject random faults into short real runs, and check that each has the required outcome.

    python -m tests.faults --minutes 20 --seed 7       random entries for 20 minutes
    python -m tests.faults --list                      names, commands and groups of all entries
    python -m tests.faults --only kill.trainer         every entry whose name contains the text, once
    python -m tests.faults --trial 7:13                one trial of --seed 7 again
    python -m tests.faults --only <entry> --trial 7:13 one entry with the random numbers of this trial

The seed sets the order of the entries, the moments and all parameters of the faults. A moment is the begin
of a phase of the run plus a delay in milliseconds, so the same trial strikes at the same place as far as the
speed of the machine permits. Every entry is tried once before an entry is repeated.

A trial whose outcome differs keeps its folder. The results are written to <work>/results-<seed>.json.

Ctrl-C ends the harness after the trials that run.

Exit code: 0 if every outcome was as required, 1 if an outcome differed, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.faults import processes
from tests.faults.catalogue import BY_NAME, ENTRIES
from tests.faults.entry import Entry
from tests.faults.runs import RUNS
from tests.faults.trial import AT_IMPORT, ROOT, Report, Trial
from tests.faults.workspace import Workspace

COMMAND = "make test-faults ARGS="


def main() -> None:
    """Run the selected trials, and print a table of their outcomes."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="tests.faults", description=__doc__, formatter_class=form)
    parser.add_argument("--minutes", type=float, help="start no trial after this time (default: each once)")
    parser.add_argument("--seed", default="0", help="seed of the order, moments and parameters (default: 0)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="entries whose names contain a text")
    parser.add_argument("--trial", metavar="SEED:INDEX", help="repeat one trial")
    parser.add_argument("--list", action="store_true", help="print the entries, and run nothing")
    parser.add_argument("--workers", type=int, default=1, help="trials in parallel (default: 1)")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all trials")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "faults", help="working folder")
    given = parser.parse_args()
    chosen = [entry for entry in ENTRIES if not given.only or selected(entry, given.only)]
    if not chosen:
        parser.error(f"no entry has a name that contains {' or '.join(given.only)}; --list prints the names")
    if given.list:
        print("\n".join(f"{entry.name:36}{RUNS[entry.run].title:48}{entry.group}" for entry in chosen))
        return
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())  # the running trials end, then the table is printed
    os.environ.update(AT_IMPORT)
    processes.isolate()
    work = given.work.resolve()
    workspace = Workspace(work / "runs")
    trials = repeated(given.trial, chosen, parser) if given.trial else drawn(chosen, given.seed)
    if not given.trial and given.minutes is None:
        trials = (trial for trial, _ in zip(trials, chosen, strict=False))
    until = time.monotonic() + 60 * given.minutes if given.minutes is not None else None
    reports = carry_out(trials, workspace, work / "trials", until, given.workers, stop)
    print(summary(reports))
    file = work / f"results-{given.trial or given.seed}.json"
    file.write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n")
    print(f"results: {os.path.relpath(file)}")
    raise SystemExit(any(not report.passed for report in reports))


def selected(entry: Entry, texts: Sequence[str]) -> bool:
    """Whether the name of an entry is, or contains, one of the texts."""
    names = [text for text in texts if text in BY_NAME]
    return entry.name in names or any(text in entry.name for text in texts if text not in names)


def drawn(entries: Sequence[Entry], seed: str) -> Iterator[tuple[str, Entry]]:
    """Yield trials without end: number and entry. Each entry comes once before an entry is repeated."""
    possible = [entry for entry in entries if missing(entry) is None]
    index = 0
    while possible:
        order = list(possible)
        random.Random(f"{seed}:{index}").shuffle(order)
        for entry in order:
            yield f"{seed}:{index}", entry
            index += 1


def repeated(
    number: str, entries: Sequence[Entry], parser: argparse.ArgumentParser
) -> Iterator[tuple[str, Entry]]:
    """Yield the trial with a number; if several entries are selected, the one that the seed draws."""
    seed, _, index = number.rpartition(":")
    if not index.isdecimal() or not seed:
        parser.error(f"--trial must be <seed>:<index>, got {number}")
    if len(entries) == 1:
        yield number, entries[0]
        return
    for drawn_number, entry in drawn(entries, seed):
        if drawn_number == number:
            yield number, entry
            return


@cache
def available(name: str) -> bool:
    """Whether a requirement of an entry is satisfied."""
    if name == "root":
        return os.geteuid() == 0 and shutil.which("mount") is not None
    return find_spec(name) is not None


def missing(entry: Entry) -> str | None:
    """Return the first requirement of an entry that is not satisfied, or None."""
    needs = {*entry.needs.split(), *RUNS[entry.run].needs.split()}
    return next((name for name in sorted(needs) if not available(name)), None)


def carry_out(
    trials: Iterator[tuple[str, Entry]],
    workspace: Workspace,
    folder: Path,
    until: float | None,
    workers: int,
    stop: threading.Event,
) -> list[Report]:
    """Carry out trials until a time of `time.monotonic`, or until `stop` is set; print a line for each."""
    reports: list[Report] = []
    lock = threading.Lock()

    def one(number: str, entry: Entry) -> Report:
        place = folder / f"{number.replace(':', '-')}-{entry.name}"
        try:
            return Trial(entry, number, place, workspace).carry_out()
        except Exception as error:  # of the harness; the other trials go on
            problem = f"harness: {type(error).__name__}: {str(error)[:1000]}"
            return Report(entry.name, number, [problem], [], [], 0.0, False, str(place))

    def work() -> None:
        while not stop.is_set() and (until is None or time.monotonic() < until):
            with lock:
                number, entry = next(trials, (None, None))
            if entry is None:
                return
            report = one(number, entry)
            with lock:
                reports.append(report)
                print(line(report), flush=True)

    with ThreadPoolExecutor(workers) as pool:
        for job in [pool.submit(work) for _ in range(workers)]:
            job.result()
    return reports


# -- output ----------------------------------------------------------------------------------------


def line(report: Report) -> str:
    """Return the line of the terminal about a trial."""
    mark = "FAILED" if report.problems else "missed" if report.missed else "ok"
    codes = ",".join(map(str, report.codes))
    text = f"{report.number:>8}  {mark:6} {report.seconds:5.1f} s  {report.entry:36} exit {codes:10} "
    text += "; ".join(report.notes)[:110]
    return "\n".join([text, *(f"{'':18}{problem}" for problem in report.problems)])


def summary(reports: Sequence[Report]) -> str:
    """Return the table of outcomes by part, and the commands that repeat the failed trials."""
    parts = Counter(part_of(report) for report in reports)
    failed = [report for report in reports if not report.passed]
    lines = ["", f"{'':28}{'tried':>8}{'survived':>10}{'failed':>8}{'missed':>8}"]
    for part, count in [*parts.items(), ("total", len(reports))]:
        own = [report for report in reports if part in (part_of(report), "total")]
        wrong = sum(not report.passed for report in own)
        late = sum(report.missed for report in own)
        lines.append(f"{part:28}{count:>8}{count - wrong:>10}{wrong:>8}{late:>8}")
    different = len({report.entry for report in reports})
    lines.append(f"{different} of {len(ENTRIES)} entries; missed: the run ended before the fault")
    if skipped := Counter(name for entry in ENTRIES if (name := missing(entry))):
        lines.append(f"not possible here: {', '.join(f'{n} need {name}' for name, n in skipped.items())}")
    for report in failed:
        lines.append(f'{COMMAND}"--only {report.entry} --trial {report.number}"')
        lines += [f"    {problem}" for problem in report.problems]
        lines.append(f"    {report.folder}")
    return "\n".join(lines)


def part_of(report: Report) -> str:
    """Return the part of the catalogue to which the entry of a report belongs."""
    return BY_NAME[report.entry].group.partition(":")[0]


if __name__ == "__main__":
    sys.exit(main())
