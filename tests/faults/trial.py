"""A trial: one entry of the catalogue is carried out in a folder, and its outcome is checked."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.core.files import discard
from tests import forks
from tests.faults import processes
from tests.faults.entry import LOAD, PHASES, START, Entry, Moment
from tests.faults.processes import Process
from tests.faults.runs import CACHE, OUT, RUN, RUNS, SERVICE, Results, Run, results
from tests.faults.service import Service

if TYPE_CHECKING:
    from tests.faults.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
SECRET = "hf_OnlyForFaultTests0123456789"  # value of the token variables: no file, no output may contain it
TRACEBACK = "Traceback (most recent call last)"
OWN_FRAME = re.compile(rf'File "{re.escape(str(ROOT))}/rlhf/')
# Temporary files that libraries leave if their process is killed.
OF_LIBRARIES = ("torchelastic_", "torchinductor_", "pymp-")
FILLER = ".filler"  # file that fills a file system
POLL_S = 0.002
# Variables that libraries read when they are imported, also in the server of tests/forks.py.
AT_IMPORT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
}
ENVIRONMENT = {
    **AT_IMPORT,
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "COLUMNS": "200",
    "HF_TOKEN": SECRET,
    "WANDB_API_KEY": SECRET,
}


@dataclass(slots=True)
class Session:
    """A started command."""

    process: subprocess.Popen[bytes]
    output: Path
    phases: Path
    began: float
    ranks: int = 0  # number of ranks of torchrun

    @property
    def code(self) -> int | None:
        """The exit code; None while the command runs. A signal that ended the command is negative."""
        return self.process.poll()

    @property
    def text(self) -> str:
        """The output so far."""
        return self.output.read_bytes().decode("utf-8", "replace")

    def count(self, phase: str) -> int:
        """Return how often a phase has begun in all processes; of several ranks, in the first to begin it."""
        if not self.phases.exists():
            return 0
        lines = [line.split() for line in self.phases.read_text().splitlines()]
        counts = Counter(process for name, process in lines if name == phase)
        return max(counts.values(), default=0) if self.ranks else counts.total()


@dataclass(slots=True)
class Report:
    """The result of a trial."""

    entry: str
    number: str  # seed and index
    problems: list[str]
    notes: list[str]  # what was done, in order
    codes: list[int | None]
    seconds: float
    missed: bool  # the run ended before the moment of the fault
    folder: str

    @property
    def passed(self) -> bool:
        """Whether the outcome was as required."""
        return not self.problems


@dataclass(slots=True)
class Trial:
    """The state of a trial. The `act` functions of the catalogue read and change it.

    Args:
        entry: the entry of the catalogue.
        number: seed and index, as `--trial` takes them.
        folder: the folder of the trial, which does not exist.
        workspace: uninterrupted and crashed runs.
    """

    entry: Entry
    number: str
    folder: Path
    workspace: Workspace
    service: Service = field(default_factory=Service)
    draw: random.Random = field(init=False)
    sessions: list[Session] = field(default_factory=list)
    second: Session | None = None  # the second command, which `act` started
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    inside: dict[str, object] = field(default_factory=dict)  # for inside/sitecustomize.py
    strays: set[str] = field(default_factory=set)  # names in the run folder that are no files of the run
    missed: bool = False
    temporary: Path = field(init=False)
    mounted: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(f"{self.number}:{self.entry.name}")

    # -- for the catalogue -------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The command."""
        return RUNS[self.entry.run]

    @property
    def out(self) -> Path:
        """The output folder."""
        return self.folder / OUT

    @property
    def cache(self) -> Path:
        """The folder of the artefacts."""
        return self.folder / CACHE

    @property
    def session(self) -> Session:
        """The newest session of the command."""
        return self.sessions[-1]

    def run_folder(self) -> Path:
        """Return the run folder: the newest folder in `out`, which contains config.yaml or will."""
        found = [path for path in self.out.glob("*") if path.is_dir() and not path.name.startswith(".")]
        assert found, "no run folder"
        return max(found, key=lambda path: path.stat().st_mtime)

    def note(self, text: str) -> None:
        """Record what was done."""
        self.notes.append(text)

    def roles(self, role: str) -> list[Process]:
        """Return the processes of a role, oldest first.

        `trainer` is the process of the command; `launcher`, `rank` and `job` are processes of launchers and
        sweeps; `generator` and `annotator` are worker processes.
        """
        found = processes.of(self.folder)
        root = self.session.process.pid
        if role == "trainer":
            return [process for process in found if process.pid == root]
        if role == "launcher":
            return [process for process in found if process.role == "launcher"]
        if role == "rank":
            return [process for process in found if process.role == "command"]
        if role == "job":
            services = ("generator", "annotator", "server")
            return [process for process in found if process.parent == root and process.role not in services]
        return [process for process in found if process.role == role]

    def process(self, role: str, patience_s: float = 20.0) -> Process | None:
        """Wait for a process of a role, and return one at random; None if the command ended before."""
        end = time.monotonic() + patience_s
        while not (found := self.roles(role)) and self.session.code is None and time.monotonic() < end:
            time.sleep(POLL_S)
        return self.draw.choice(found) if found else None

    def start(self, module: str = "", arguments: Sequence[str] | None = None) -> Session:
        """Start the command of the entry, or another command, without waiting for its end."""
        run, number = self.run, len(self.sessions) + (self.second is not None) + 1
        given = run.arguments if arguments is None else arguments
        keys = {word.partition("=")[0] for word in self.entry.words}
        given = [word for word in given if word.partition("=")[0] not in keys]
        words = [self.filled(word) for word in (*given, *self.entry.words)]
        command = [sys.executable, "-m", module or run.module, *words]
        if run.ranks:
            launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks)]
            command = [sys.executable, "-m", *launcher, *command[1:]]
        phases = self.folder / f"phases-{number}"
        inside = {"phases": str(phases), **self.inside}
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
            **ENVIRONMENT,
            "PYTHONPATH": f"{Path(__file__).with_name('inside')}{os.pathsep}{ROOT}",
            "TMPDIR": str(self.temporary),
            "RLHF_FAULTS": json.dumps(inside),
        }
        output = self.folder / f"session-{number}.log"
        start = subprocess.Popen if self.entry.fresh or not forks.SUPPORTED else forks.Popen
        with output.open("wb") as file:
            process = start(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Session(process, output, phases, time.monotonic(), run.ranks)

    def filled(self, word: str) -> str:
        """Return an argument with the address of the service and the run folder in place of their names."""
        if SERVICE in word:
            word = word.replace(SERVICE, self.service.address)
        return word.replace(RUN, f"{OUT}/{self.run_folder().name}") if word == f"run={RUN}" else word

    def until(self, moment: Moment) -> bool:
        """Wait for a moment; return False if the command ended before."""
        count, delay = moment.draw(self.draw)
        session = self.session
        end = time.monotonic() + self.run.limit_s
        while not self.reached(moment.phase, count):
            if session.code is not None or time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        time.sleep(delay)
        self.note(f"{moment.phase} {count} + {1000 * delay:.0f} ms")
        return session.code is None

    def reached(self, phase: str, count: int) -> bool:
        """Return whether a phase has begun `count` times."""
        if phase in PHASES:
            return self.session.count(phase) >= count
        if phase == START:  # a forked command first forks a server, while signals could get lost
            return self.entry.fresh or not forks.SUPPORTED or bool(self.roles("server"))
        return any(self.folder.glob(f"{OUT}/*/config.yaml" if phase == LOAD else phase))

    # -- the trial ---------------------------------------------------------------------------------

    def carry_out(self) -> Report:
        """Carry out the entry, check its outcome, and remove the folder if the outcome is as required."""
        began = time.monotonic()
        with self.prepared():
            before = processes.shared_memory()
            self.strike()
            code = self.finish(self.session)
            self.check(self.session, code, self.entry.outcome.codes | ({0: ""} if self.missed else {}))
            if self.second is not None:
                self.check(self.second, self.finish(self.second), self.entry.outcome.second)
            self.check_leftovers(self.entry.outcome.grace_s)
            if self.entry.repair is not None:
                self.entry.repair(self)
            if not self.problems and self.entry.outcome.same:
                self.compare(code)
            self.check_leftovers(self.entry.outcome.grace_s)
            self.check_secrets()
            if lost := processes.unused(processes.shared_memory() - before):
                self.problems.append(f"shared memory left: {', '.join(sorted(lost))}")
        codes = [session.code for session in self.sessions]
        codes += [self.second.code] if self.second is not None else []
        report = Report(
            self.entry.name,
            self.number,
            self.problems,
            self.notes,
            codes,
            time.monotonic() - began,
            self.missed,
            str(self.folder),
        )
        if report.passed:
            shutil.rmtree(self.folder, ignore_errors=True)
        return report

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Fill the folder of the trial; afterwards end what still runs."""
        entry = self.entry
        shutil.rmtree(self.folder, ignore_errors=True)
        self.temporary = Path(tempfile.mkdtemp(prefix="faults-"))  # short: sockets have paths of 107 bytes
        with self.service:
            try:
                self.workspace.fill(self.folder, entry.run, entry.begin)
                if entry.prepare is not None:
                    entry.prepare(self)
                yield
            finally:
                processes.kill(self.folder)
                for session in (*self.sessions, *([self.second] if self.second else [])):
                    session.process.wait()
                for place in reversed(self.mounted):
                    subprocess.run(["umount", "-l", place], capture_output=True)
                shutil.rmtree(self.temporary, ignore_errors=True)

    def strike(self) -> None:
        """Start the command, and inject the fault at its moment."""
        if self.entry.at is None:
            self.entry.act(self)
            self.sessions.append(self.start())
            return
        self.sessions.append(self.start())
        if self.until(self.entry.at):
            self.entry.act(self)
        else:
            self.missed = True
            self.note("the run ended before the fault")

    def finish(self, session: Session) -> int | None:
        """Wait for the end of a command; return its exit code, or None after the time limit."""
        left = session.began + self.run.limit_s - time.monotonic()
        try:
            session.process.wait(max(left, 1.0))
        except subprocess.TimeoutExpired:
            self.problems.append(f"no end within {self.run.limit_s:g} s")
            return None
        return session.code

    def check(self, session: Session, code: int | None, allowed: Mapping[int, str]) -> None:
        """Check exit code and output of a command that has ended."""
        text = session.text
        if code is not None and code not in allowed:
            last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
            expected = " or ".join(map(str, allowed))
            self.problems.append(f"exit code {code} instead of {expected}: {last[:200]}")
        elif code is not None and (pattern := allowed[code]) and not found(pattern, text):
            self.problems.append(f"exit code {code} without {pattern!r} in the output")
        # torchrun prints the traceback of its own error
        own = OWN_FRAME.search(text) if self.run.ranks else TRACEBACK in text
        if own and not self.entry.outcome.traceback:
            self.problems.append(f"traceback in {session.output.name}: {error_of(text)}")

    def check_leftovers(self, grace_s: float) -> None:
        """Check that no process and no temporary file of the trial is left."""
        remaining = processes.left(self.folder, grace_s)
        if remaining:
            shown = ", ".join(
                f"{process.role} {process.pid} ({' '.join(process.arguments)[:80]})" for process in remaining
            )
            self.problems.append(f"processes left after {grace_s:g} s: {shown}")
            processes.kill(self.folder)
        names = sorted(path.name for path in self.temporary.iterdir())
        names = [name for name in names if not name.startswith((*OF_LIBRARIES, FILLER))]
        if names:
            self.problems.append(f"temporary files left: {', '.join(names[:5])}")
            for name in names:
                discard(self.temporary / name)
        for log in (*self.out.glob("*/generator*.log"), *self.out.glob("*/annotator*.log")):
            text = log.read_text(errors="replace") if log.is_file() else ""
            problem = f"traceback in {log.name}: {error_of(text)}"
            own = OWN_FRAME.search(text) is not None  # vLLM logs the tracebacks of its warnings
            if own and not self.entry.outcome.traceback and problem not in self.problems:
                self.problems.append(problem)

    def compare(self, code: int | None) -> None:
        """Run the same command again if it did not finish, and compare its results with the reference."""
        outcome = self.entry.outcome
        if code != 0:
            self.inside = {}
            self.sessions.append(self.start())
            self.note("the same command again")
            self.check(self.session, self.finish(self.session), {0: ""})
            if self.problems or self.session.code != 0:
                return
        reference = self.workspace.reference(self.entry.run)
        try:
            now: Results = results(self.folder, self.run.exact)
        except (OSError, ValueError, KeyError) as error:
            self.problems.append(f"results cannot be read: {type(error).__name__}: {error}")
            return
        said = "".join(session.text for session in (*self.sessions, *filter(None, [self.second])))
        differences = now.differences(reference)
        if outcome.gone:
            differences = [each for each in differences if not each.startswith(f"{outcome.gone}/")]
        if differences and not (outcome.reported and found(outcome.reported, said)):
            self.problems += differences[:4]
        leftover = [path.name for path in self.out.glob("*/.tmp-*") if path.name not in self.strays]
        if leftover and not outcome.reported:
            self.problems.append(f"unfinished files left: {', '.join(leftover[:5])}")

    def check_secrets(self) -> None:
        """Check that no file and no output contains the value of a token variable."""
        for file in self.folder.rglob("*"):
            small = file.is_file() and not file.is_symlink() and file.stat().st_size < 2**22
            if small and SECRET.encode() in file.read_bytes():
                self.problems.append(f"{file.relative_to(self.folder)} contains a secret")


def found(pattern: str, text: str) -> bool:
    """Return whether a text contains a pattern; line breaks count as spaces."""
    return re.search(pattern, " ".join(text.split())) is not None


def error_of(text: str) -> str:
    """Return the last line of the first traceback in a text."""
    lines = text[max(text.find(TRACEBACK), 0) :].splitlines()[1:]
    return next((line for line in lines if line and not line.startswith((" ", "\t"))), "")[:160]
