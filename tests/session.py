"""Marks, order, processes and final report of a test session.

- Tests of `tests/end_to_end` are marked `run` and, unless they are marked `forks(False)`, `forks`.
- A test that starts a Python process must have one of the marks `process`, `run`, `system` or `gpu`. Without
  a mark, the test fails.
- The longest tests run first, by the seconds in `durations.json`. `--record-durations` writes the seconds of
  the tests that ran, and keeps those of the others.
  Tests of a file with fixtures of module scope run on one worker of pytest-xdist.
- In tests marked `forks`, Python processes are forked from a server that has imported the libraries.
- The final report counts the tests that were skipped or not selected, with the command that enables them.

Nightly tests, and what stands for them in `make test-all`:

- the default run raises the win rate (`test_learning.py`): golden losses, and metrics of short runs
- SLURM: two nodes, time limit, failed, repeated and cancelled jobs: a job that is preempted, requeued and
  resumed; ranks of a job; rejected settings
- steps of ZeRO 0 and 1, offloading, ZeRO on one rank and on three, runs of DPO and reward models on ZeRO 3:
  steps of torch, ZeRO 2 and ZeRO 3 on two ranks, the settings of offloading, runs of PPO on ZeRO 2 and ZeRO 3
- every algorithm with Hugging Face at lags 0 and 1, with vLLM: with Hugging Face at lag 2, whose updates have
  the lags 0, 1 and 2; DPO and PPO with vLLM at lag 2
- online algorithms with minibatches and epochs, further options of algorithms and corrections: DPO, PPO, GRPO
  and the algorithms for stale samples; their losses in `tests/golden`
- recipes that differ in few settings from another one: the other recipes with `debug=tiny`
- two ranks: vLLM, shared generator, in-flight updates, data without sampling: DPO, PPO, RLOO, replay with
  corrections
- vLLM: `vllm serve`, GPU transfer, evaluation of checkpoints, GPT-NeoX beside Llama: sampling and log-probs
  of Llama after each weight transfer, a run of GPT-NeoX
- a server of vLLM that judges: wrong key, garbage, hang, kill: the same faults of a server in a thread
- servers: 20 random kills of a trainer: a lost server samples again; the servers of a killed trainer end
- joblib sweeps; pipelines, extensions and sweeps started twice: local sweeps; runs, evaluations and
  relabellings started twice
- faults: further moments, damaged files and answers of a service; further resumed and extended runs: one
  moment, file or answer of each kind; two entries of `make test-faults`
- the trials of `make test-faults` (`tests/faults/test_harness.py`): its catalogue and its clock
- stages of `make test-gpu` in miniature, and on a pretended GPU: reports of stages that fail, hang or crash
- studies: 6 random kills of the command, workers and attempts change no row: a killed worker, a killed
  attempt, failed runs
- compiled blocks, a compiled run: a compiled head; blocks outside of their context
- hooks of `rlhf audit` in trainers of TRL, in functions of verl and OpenRLHF: hooks around functions of tests
- bundles of all algorithms and schedules, 16 changes of code: a bundle of GRPO, one with a judge, 4 changes
- the notebook, the benchmark against TRL, the tables of studies
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests import forks
from tests.needs import ENABLE

ROOT = Path(__file__).parents[1]
DURATIONS = Path(__file__).with_name("durations.json")
SHORTEST_S = 0.5  # shorter durations are not recorded
STARTS = ("process", "run", "system", "gpu")  # marks of tests that may start a Python process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.name}")


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with SIGINT ignored, and their child processes ignore SIGINT too. A child
    # does not inherit a handler, so this handler, which does nothing, restores Ctrl-C for child processes.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)
    config.stash[DESELECTED] = Counter()
    config.stash[SECONDS] = Counter()


# -- marks and order -------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]):
    for item in items:
        if "end_to_end" in item.path.parts:
            item.add_marker("run")
            if item.get_closest_marker("forks") is None:
                item.add_marker("forks")
    yield
    seconds, units = recorded(), Counter()
    for item in items:
        units[unit(item.nodeid)] += seconds.get(item.nodeid, 0.0)
    items.sort(key=lambda item: -units[unit(item.nodeid)])  # stable: a file's tests keep their order


def unit(nodeid: str) -> str:
    """Return the unit that runs on one worker: a file with fixtures of module scope, or a single test."""
    path = nodeid.partition("::")[0]
    return path if shares(path) else nodeid


@cache
def shares(path: str) -> bool:
    """Whether the tests of a file share fixtures."""
    return 'scope="module"' in (ROOT / path).read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Distribute units in the order of the tests. With pytest 9.2, `--dist loadgroup` groups no tests."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False
    return Units(config, log)


# -- processes -------------------------------------------------------------------------------------

unmarked: str | None = None  # id of the running test, if it must not start a Python process


def forbid(event: str, arguments: tuple) -> None:
    """Raise an error if an unmarked test starts a Python process."""
    if event == "subprocess.Popen" and unmarked is not None and arguments[0] == sys.executable:
        raise AssertionError(f"{unmarked} starts a Python process: mark it `process`")


sys.addaudithook(forbid)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    global unmarked
    mark = item.get_closest_marker("forks")
    forks.install(mark is not None and mark.args != (False,) and forks.SUPPORTED)
    unmarked = None if any(item.get_closest_marker(name) for name in STARTS) else item.nodeid
    try:
        return (yield)
    finally:
        forks.install(False)
        unmarked = None


# -- final report ----------------------------------------------------------------------------------

DESELECTED = pytest.StashKey[Counter]()
SECONDS = pytest.StashKey[Counter]()
ENABLES = {  # the first mark of a test counts
    "nightly": ("nightly tests", "make test-nightly"),
    "system": ("tests of SLURM, the browser and DeepSpeed", "make test-all"),
    "gpu": ("GPU tests", "make test-all on a machine with a GPU"),
    "run": ("end-to-end runs", "make test-all"),
    "process": ("tests that start processes", "make test-all"),
}


@pytest.hookimpl
def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        kind = next((name for name in ENABLES if item.get_closest_marker(name)), None)
        if kind is not None:
            item.config.stash[DESELECTED][kind] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a worker sends its counts to the main session
        session.config.workeroutput["deselected"] = dict(session.config.stash[DESELECTED])
    elif session.config.option.record_durations:
        took = {name: round(seconds, 1) for name, seconds in session.config.stash[SECONDS].items()}
        known = {name: s for name, s in recorded().items() if (ROOT / name.partition("::")[0]).exists()}
        kept = {name: seconds for name, seconds in {**known, **took}.items() if seconds >= SHORTEST_S}
        DURATIONS.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")


def recorded() -> dict[str, float]:
    """Return the recorded seconds of tests by id."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    node.config.stash[DESELECTED].update(Counter())
    for kind, count in getattr(node, "workeroutput", {}).get("deselected", {}).items():
        node.config.stash[DESELECTED][kind] = count  # every worker deselects the same tests


class Durations:
    """Sums the seconds of each test over its phases."""

    def __init__(self, seconds: Counter) -> None:
        self.seconds = seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(Durations(session.config.stash[SECONDS]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped[reason.removeprefix("Skipped: ")] += 1
    lines = [f"{count} skipped: {reason}" for reason, count in skipped.most_common()]
    for kind, count in config.stash[DESELECTED].items() if config.option.markexpr else ():
        what, command = ENABLES[kind]
        lines.append(f"{count} not selected: {what}{ENABLE}{command}")
    if lines:
        terminalreporter.section("not run")
        for line in lines:
            terminalreporter.line(line)
