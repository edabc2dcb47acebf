"""Fixtures of the end-to-end tests: tiny runs on the embedded task, with artefacts shared by all tests."""

import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from safetensors import safe_open

from rlhf.config.root import Config
from rlhf.core.state import TrainState
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.training.recorder import Recorder
from rlhf.words.compose import compose
from tests.end_to_end.wheels import build_this_project
from tests.hub_server import Hub, in_place_of_the_hub

TINY = ["debug=tiny", "task.train_size=128", "task.validation_size=32", "task.test_size=8", "progress=off"]
UPDATES_ONLY = ["schedule.eval_every=0", "schedule.save_every=0"]  # neither changes the weights
VARIES = ("time/", "throughput/", "memory/")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    """Return the cache folder of all pytest workers. The first worker that needs an artefact makes it."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if base.name.startswith("popen-") else base) / "artefacts"


@pytest.fixture(scope="session")
def tiny(cache_dir) -> Callable[..., Config]:
    """`tiny(*overrides)` returns the config of a run of a few updates."""
    return lambda *overrides: compose([*TINY, f"cache_dir={cache_dir}", *overrides])


@pytest.fixture(scope="session")
def made_once(cache_dir) -> Callable[[str, Callable[[Path], object]], Path]:
    """`made_once(name, make)` returns a folder that `make(folder)` fills, once for all pytest workers."""

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder = cache_dir.with_name("made_once") / name
        complete = folder.with_suffix(".complete")
        folder.parent.mkdir(exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                complete.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def wheel(made_once) -> Path:
    """Return the wheel of this project."""
    (file,) = made_once("wheel", build_this_project).glob("*.whl")
    return file


@pytest.fixture(scope="session")
def finished(cache_dir, made_once) -> Callable[..., RunFolder]:
    """`finished(*overrides)` returns the folder of a finished tiny run. Tests must not change the folder."""

    def get(*overrides: str) -> RunFolder:
        cfg = compose([*TINY, f"cache_dir={cache_dir}", *overrides])
        name = hashlib.sha256(repr(cfg).encode()).hexdigest()[:16]
        return RunFolder(made_once(name, lambda folder: run(cfg, RunFolder(folder))))

    return get


@pytest.fixture
def command(cache_dir, tmp_path) -> list[str]:
    """Return the command-line arguments of a tiny run with its output in `tmp_path`."""
    return [*TINY, f"cache_dir={cache_dir}", f"output_dir={tmp_path}"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Return a server in place of the hub, for the real client of the hub."""
    with in_place_of_the_hub(monkeypatch) as made:
        yield made


def nightly(*values: object, **named: object):
    """Return a row of `pytest.mark.parametrize` that only make test-nightly runs."""
    return pytest.param(*values, marks=pytest.mark.nightly, **named)


@contextmanager
def interrupted(update: int) -> Iterator[None]:
    """Let the run in the block crash after an update."""
    flush = Recorder.flush

    def crash(self: Recorder, state: TrainState, *rest: Any) -> None:
        flush(self, state, *rest)
        if state.update == update:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Recorder, "flush", crash)
        yield


def assert_same_end(a: RunFolder, b: RunFolder) -> None:
    """Check that two finished runs have equal rows, completions and final weights (bit for bit)."""
    assert a.finished() and b.finished()
    assert rows(a) == rows(b)
    assert a.completions.read_text() == b.completions.read_text()
    one, other = (safe_open(each.model / "model.safetensors", "pt") for each in (a, b))
    assert one.keys() == other.keys()
    assert all(one.get_tensor(name).equal(other.get_tensor(name)) for name in one.keys())  # noqa: SIM118


def rows(folder: RunFolder | Path) -> list[dict]:
    """Return the rows of metrics.jsonl without the metrics that differ between equal runs (see `VARIES`)."""
    path = folder.path if isinstance(folder, RunFolder) else folder
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(VARIES)} for line in lines]


def wait_for(
    condition: Callable[[], object], process: subprocess.Popen[str] | None = None, seconds: float = 500
) -> None:
    """Wait until `condition()` is true. Fail after `seconds`, or when `process` ends before."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition did not become true within {seconds} s"
        assert process is None or process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.05)
