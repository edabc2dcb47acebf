"""Tiny runs and bundles of them, which the tests of a session share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.referee.bundle import bundle
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.words.compose import compose

TINY = [
    *("debug=tiny", "task.train_size=128", "task.validation_size=32", "task.test_size=8", "progress=off"),
    *(
        "scorer.missing_eos_score=null",
        "schedule.minibatches=2",
        "schedule.eval_every=0",
        "schedule.save_every=1",
    ),
]
OTHERS = {"algo": "grpo", "scorer": "facts"}


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Callable[..., RunFolder]:
    """`trained(*overrides, again=0)` returns the folder of a finished run: two updates of GRPO."""
    made: dict[tuple[object, ...], RunFolder] = {}
    base = tmp_path_factory.mktemp("referee")

    def get(*overrides: str, again: int = 0) -> RunFolder:
        key = (overrides, again)
        if key not in made:
            folder = RunFolder(base / f"run{len(made)}")
            given = {word.partition("=")[0] for word in overrides}
            others = [f"{key}={value}" for key, value in OTHERS.items() if key not in given]
            run(compose([*TINY, *others, f"cache_dir={base / 'cache'}", *overrides]), folder)
            made[key] = folder
        return made[key]

    return get


@pytest.fixture(scope="session")
def recorded(trained) -> Callable[..., Path]:
    """`recorded(*overrides, update=2)` returns the bundle of an update of a run, repeated exactly."""
    made: dict[tuple[object, ...], Path] = {}

    def get(*overrides: str, update: int = 2) -> Path:
        key = (overrides, update)
        if key not in made:
            folder = trained(*overrides)
            file = folder.path.with_name(f"{folder.path.name}-{update}.safetensors")
            assert bundle(folder, update, file)
            made[key] = file
        return made[key]

    return get
