"""The command line, called in this process with a run that only says what it was given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra._internal.hydra import Hydra

from rlhf.config.root import Config
from rlhf.runs.folder import RunFolder


@dataclass
class Answer:
    """What a command did."""

    code: int
    out: str
    err: str
    runs: list[tuple[Config, RunFolder]] = field(default_factory=list)


Command = Callable[..., Answer]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """`command("algo=dpo", ...)` is `python -m rlhf.train algo=dpo ...` in an empty folder, without training.

    `during` is called in place of the run; without it, the run returns 0.5.
    """
    from rlhf.train import main

    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # main() sets it; this brings it back
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)  # composes only to look for hydra.mode
    monkeypatch.chdir(tmp_path)

    def call(*words: str, during: Callable[[Config, RunFolder], float] | None = None) -> Answer:
        runs: list[tuple[Config, RunFolder]] = []

        def run(cfg: Config, folder: RunFolder) -> float:
            runs.append((cfg, folder))
            return during(cfg, folder) if during else 0.5

        monkeypatch.setitem(sys.modules, "rlhf.stages.run", SimpleNamespace(run=run))
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        said = capsys.readouterr()
        return Answer(code, said.out, said.err, runs)

    return call


@pytest.fixture
def own_conf(tmp_path: Path) -> Path:
    """A folder laid out like conf/, with experiment files that are wrong in one way each."""
    files = {
        "typo": "algo:\n  beat: 1\n",
        "wrong_type": "algo:\n  beta: high\n",
        "wrong_group": "defaults:\n  - override /algoo: dpo\n",
        "wrong_option": "defaults:\n  - override /algo: dppo\n",
        "no_yaml": "algo: {beta: [1\n",
        "fine": "algo:\n  beta: 0.3\n",
    }
    folder = tmp_path / "own" / "experiment"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(f"# @package _global_\n# {name} of the tests\n{text}")
    return folder.parent
