"""Change one line of the package at a time, and report which changes no fast test notices.

    python -m tests.mutants                                   all rows of tests/mutants/table.py
    python -m tests.mutants training/clock.py study/          rows whose file contains one of these texts
    python -m tests.mutants --again                           also rows that have a result

Each row of the table names a file of `rlhf/`, an old line, a new line, and the nearest test files. The
command copies the checkout to a temporary folder, changes the line there, and runs the fast tests of these
files until one fails. It first runs them without a change. Results are kept in outputs/mutants.jsonl, so an
interrupted run continues where it stopped; a row runs again if its file or a test file changed.

Exit code: 0 if every change was caught or is listed as harmless, 1 if one survived, 2 if a line of the table
is not in its file exactly once (the code has moved: correct the row), or if the tests fail without a change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
FAST = "not (run or process or system or gpu or nightly)"
LIMIT_S = 600  # of the tests of a row; a change that makes them hang is caught
PRELOADED = "torch", "transformers", "pytest", "scipy.stats", "pandas"


def changed(text: str, mutant: Mutant) -> str:
    """Return the text of a file with the new line in place of the old one.

    Raises:
        ValueError: the old line is not in the file exactly once.
    """
    lines = text.splitlines(keepends=True)
    with_comments = [place for place, line in enumerate(lines) if line.strip() == mutant.old]
    without = [place for place, line in enumerate(lines) if line.split("  #")[0].strip() == mutant.old]
    places = with_comments or without
    if len(places) != 1:
        raise ValueError(
            f"rlhf/{mutant.file} must have this line once, got {len(places)} times: {mutant.old}"
        )
    line = lines[places[0]]
    lines[places[0]] = line.replace(mutant.old, mutant.new) if mutant.new else ""
    return "".join(lines)


def copy(folder: Path) -> None:
    """Copy the files of the checkout that git knows, as they are now."""
    names = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True)
    for name in filter(None, names.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())


def fail(folder: Path, tests: Sequence[str]) -> bool:
    """Return whether the fast tests of some files fail in a folder, run by a fork of this process.

    Raises:
        RuntimeError: pytest cannot run them.
    """
    log = folder / "mutant.log"
    if (child := os.fork()) == 0:
        os.setpgid(0, 0)
        os.chdir(folder)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] in ("rlhf", "tests", "benchmarks")]:
            del sys.modules[name]
        import pytest

        os._exit(pytest.main(["-xq", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", FAST, *tests]))
    begun = time.monotonic()
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() - begun > LIMIT_S:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return True
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(ended[1])
    if code not in (0, 1, 2) and code >= 0:  # 2: the change is an error at an import; below 0: a signal
        raise RuntimeError(
            f"pytest must run {', '.join(tests)}, got exit code {code}: {log.read_text()[-800:]}"
        )
    return code != 0


def key(mutant: Mutant) -> str:
    """Return what the result of a row belongs to: the changed file and its tests."""
    tests = [(ROOT / name).read_text() for name in mutant.tests]
    text = changed((ROOT / "rlhf" / mutant.file).read_text(), mutant)
    return hashlib.sha256("\0".join([mutant.file, text, *tests]).encode()).hexdigest()[:16]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows that have no result yet, and print all results."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m tests.mutants",
    )
    parser.add_argument("files", nargs="*", help="only rows whose file contains one of these texts")
    parser.add_argument("--again", action="store_true", help="also rows that have a result")
    asked = parser.parse_args(argv)
    rows = [m for m in MUTANTS if not asked.files or any(text in m.file for text in asked.files)]
    try:
        keys = {mutant: key(mutant) for mutant in rows}
    except (OSError, ValueError) as error:
        print(f"error: {error}; correct tests/mutants/table.py", file=sys.stderr)
        return 2
    results = ROOT / "outputs" / "mutants.jsonl"
    results.parent.mkdir(exist_ok=True)
    lines = results.read_text().splitlines() if results.exists() and not asked.again else []
    known: dict[str, bool] = dict(map(json.loads, lines))
    os.nice(10)
    for name in PRELOADED:
        __import__(name)
    healthy: set[tuple[str, ...]] = set()
    with tempfile.TemporaryDirectory() as temporary:
        copy(folder := Path(temporary))
        for mutant in rows:
            if (caught := known.get(keys[mutant])) is None:
                if mutant.tests not in healthy and fail(folder, mutant.tests):
                    log = (folder / "mutant.log").read_text()[-800:]
                    print(f"error: {', '.join(mutant.tests)} fail without a change: {log}", file=sys.stderr)
                    return 2
                healthy.add(mutant.tests)
                path = folder / "rlhf" / mutant.file
                before = path.read_text()
                path.write_text(changed(before, mutant))
                try:
                    caught = fail(folder, mutant.tests)
                finally:
                    path.write_text(before)
                with results.open("a") as file:
                    file.write(json.dumps([keys[mutant], caught]) + "\n")
            known[keys[mutant]] = caught
            fate = "caught  " if caught else "harmless" if mutant.harmless else "SURVIVED"
            note = f"   ({mutant.harmless})" if mutant.harmless else ""
            print(f"{fate} {mutant.file}: {mutant.old}  ->  {mutant.new or '(removed)'}{note}", flush=True)
    left = [mutant for mutant in rows if not known[keys[mutant]] and not mutant.harmless]
    print(f"{len(rows)} changes, {sum(known[k] for k in keys.values())} caught, {len(left)} survived")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
