"""Select the constants of the collapse warning on one half of many runs, and measure the rule on the other.

    python -m benchmarks.collapse                 measure, and update docs/results/collapse.md
    python -m benchmarks.collapse <folder> [...]  the same with the runs in folders; they replace the runs in
                                                  docs/results/collapse_runs.npz
    python -m benchmarks.collapse [...] --dry     print only

A run counts if it sampled, has at least `EVALUATIONS` evaluations, and has more than `EARLY` updates; rows of
single updates (schedule.log_every=1) give exact leads. A run has collapsed if its loss became not finite, or
if its win rate (the accuracy, of tasks with right and wrong answers) ends `FALL` or more below its best
value. The collapse is at the first evaluation after which it stays that low, so evaluations that are far
apart make the lead look longer. The runs are ordered by a hash of the names of their folders; the first half
selects the constants, so that the larger of the two error rates (missed collapses, false alarms) is smallest.
In the page, only the part between the two marks is generated.

The rule is `rlhf.training.collapse.CollapseRule`; this program replays its averages row by row.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.collapse.cases import cases_of, packed, read, stored, write
from benchmarks.collapse.page import MARKS, written
from rlhf.checks.check import refuse
from rlhf.core.errors import UserError
from rlhf.core.files import write_atomically
from rlhf.study.page import fill

RESULTS = Path(__file__).parents[2] / "docs/results"
DOCUMENT = RESULTS / "collapse.md"
RUNS = RESULTS / "collapse_runs.npz"  # the runs of the study, with the metrics that the rule reads


def main(args: Sequence[str] | None = None) -> None:
    """Read the runs, select the constants, measure them, and update the page."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("folders", nargs="*", help="run folders, or folders that contain run folders")
    parser.add_argument("--dry", action="store_true", help="write no file")
    given = parser.parse_args(args)
    try:
        cases = stored(packed(cases_of(given.folders))) if given.folders else read(RUNS)
        text = written(cases)
        print(text)
        if not given.dry:
            if given.folders:
                write(RUNS, cases)
            write_atomically(DOCUMENT, fill(DOCUMENT.read_text(encoding="utf-8"), MARKS, f"\n{text}\n"))
    except UserError as error:
        refuse(error.problems)


if __name__ == "__main__":
    main()
