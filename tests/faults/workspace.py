"""Folders of runs without a fault and of crashed runs, made once and copied for each trial."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from tests.faults.entry import Entry, Moment, Outcome
from tests.faults.runs import CACHE, OUT, PAIRS, RUNS, Results, results
from tests.faults.trial import ROOT, Trial

CRASHED_AT = 4  # update in which a crashed run was killed; its last checkpoint is the one before
PAIR_COUNTS = {"train": 96, "validation": 32}


class Workspace:
    """A folder with uninterrupted and crashed runs of the current source code.

    Args:
        base: the folder; processes may share it.
    """

    def __init__(self, base: Path) -> None:
        self.base = base / digest_of_sources()
        self.base.mkdir(parents=True, exist_ok=True)
        self.compared: dict[str, Results] = {}

    def fill(self, folder: Path, run: str, begin: str) -> None:
        """Create the folder of a trial.

        Args:
            folder: the folder, which does not exist.
            run: the command (`runs.RUNS`).
            begin: "new", "crashed" or "finished".
        """
        kind = RUNS[run]
        if begin == "crashed":
            source = self.crashed(run)
        elif begin == "finished":
            source = self.finished(run)
        elif kind.base:
            source = self.finished(kind.base)
        else:
            folder.mkdir(parents=True)
            (folder / OUT).mkdir()
            if kind.artefacts:
                shutil.copytree(self.finished("stages") / CACHE, folder / CACHE)
            if kind.module == "rlhf.relabel":
                shutil.copytree(self.once("pairs", write_pairs), folder / PAIRS)
            return
        folder.mkdir(parents=True)
        for path in source.iterdir():
            if path.is_dir():
                shutil.copytree(path, folder / path.name, symlinks=True)

    def reference(self, run: str) -> Results:
        """Return the results of an uninterrupted run."""
        if run not in self.compared:
            self.compared[run] = results(self.finished(run), RUNS[run].exact)
        return self.compared[run]

    def finished(self, run: str) -> Path:
        """Return the folder of an uninterrupted run."""

        def make(folder: Path) -> None:
            entry = Entry("reference", "", run, act=nothing, outcome=Outcome({0: ""}, same=False))
            trial = Trial(entry, "0", folder, self)
            with trial.prepared():
                trial.sessions.append(trial.start())
                trial.check(trial.session, trial.finish(trial.session), {0: ""})
                trial.check_leftovers(10.0)
            assert not trial.problems, f"{run}: {trial.problems}\n{trial.session.text[-3000:]}"

        return self.once(f"finished-{run}", make)

    def crashed(self, run: str) -> Path:
        """Return the folder of a run that was killed in update CRASHED_AT."""

        def make(folder: Path) -> None:
            entry = Entry("crash", "", run, act=nothing, outcome=Outcome({-9: ""}, same=False))
            trial = Trial(entry, "0", folder, self)
            with trial.prepared():
                trial.sessions.append(trial.start())
                met = trial.until(Moment("train", (CRASHED_AT,), spread_s=0))
                for process in trial.roles("rank") if trial.run.ranks else trial.roles("trainer"):
                    process.send(signal.SIGKILL)
                trial.finish(trial.session)
                trial.check_leftovers(30.0)
            assert met and not trial.problems, f"{run}: {trial.problems}\n{trial.session.text[-3000:]}"

        return self.once(f"crashed-{run}", make)

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return a folder that `make(folder)` creates, once for all processes that share the workspace."""
        folder = self.base / name
        with FileLock(folder.with_suffix(".lock")):
            if not folder.with_suffix(".complete").exists():
                shutil.rmtree(folder, ignore_errors=True)
                make(folder)
                folder.with_suffix(".complete").touch()
        return folder


def nothing(trial: Trial) -> None:
    """Inject no fault."""


def digest_of_sources() -> str:
    """Return a digest of the project's code and config, on which results depend."""
    digest = hashlib.sha256()
    for top, pattern in (("rlhf", "*.py"), ("conf", "*.yaml"), ("tests/faults", "runs.py")):
        for file in sorted((ROOT / top).rglob(pattern)):
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def write_pairs(folder: Path) -> None:
    """Write preference pairs of the embedded task: the reference of a post and the reference of another."""
    from rlhf.assembly.parts import make
    from rlhf.words.compose import compose
    from tests.faults.runs import TINY

    source = make(compose([*TINY]).task)
    folder.mkdir(parents=True)
    for split, count in PAIR_COUNTS.items():
        rows = source.prompts(split)
        rows = rows.select(range(min(count, len(rows))))
        texts = rows["reference_response"]
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for i, query in enumerate(rows["query"]):
                own, other = texts[i], texts[i - 1]
                pair = (own, other) if i % 3 else (other, own)
                file.write(json.dumps({"prompt": query, "chosen": pair[0], "rejected": pair[1]}) + "\n")
