"""Fixtures that call the command line in the process of the test, with a function in place of training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra._internal.hydra import Hydra

from rlhf.config.root import Config
from rlhf.loggers.logger import Hook
from rlhf.runs.folder import RunFolder
from rlhf.runs.lock import Claim, claimed


@dataclass
class Answer:
    """The exit code, the output and the runs of a command."""

    code: int
    out: str
    err: str
    runs: list[tuple[Config, RunFolder]] = field(default_factory=list)


Command = Callable[..., Answer]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that calls `rlhf.train` in an empty folder without training.

    `command("algo=dpo", ...)` stands for `python -m rlhf.train algo=dpo ...`. The function `during` is
    called in place of the run. Without `during`, the run returns 0.5.
    """
    from rlhf.train import main

    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # main() sets it; monkeypatch restores it
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)  # it composes a config only for hydra.mode
    monkeypatch.chdir(tmp_path)

    def call(*words: str, during: Callable[[Config, RunFolder], float] | None = None) -> Answer:
        runs: list[tuple[Config, RunFolder]] = []

        def run(
            cfg: Config,
            folder: RunFolder,
            check: bool = True,
            claim: Claim = claimed,
            hooks: Sequence[Hook] = (),
        ) -> float:
            assert not check, "the command line has checked the config"
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
def called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`called(main, *words)` calls the `main` of a command; returns its exit code, stdout and stderr."""

    def call(main: Callable[[], None], *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["command", *words])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def own_conf(tmp_path: Path) -> Path:
    """Return a folder laid out like conf/: one valid experiment file, and files with one error each."""
    files = {
        "typo": "algo:\n  beat: 1\n",
        "chain": "defaults:\n  - typo\n  - _self_\nseed: 2\n",
        "list": "optim:\n  betas: [0.9, high]\n",
        "reference": "algo:\n  beta: ${nope}\n",
        "two": "defaults:\n  - /algo: dpo\n",
        "wrong_type": "algo:\n  beta: high\n",
        "wrong_group": "defaults:\n  - override /algoo: dpo\n",
        "wrong_option": "defaults:\n  - override /algo: dpoo\n",
        "named": "algo:\n  name: ppo\n",
        "no_yaml": "algo: {beta: [1\n",
        "fine": "algo:\n  beta: 0.3\n",
    }
    folder = tmp_path / "own" / "experiment"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(f"# @package _global_\n# {name} of the tests\n{text}")
    (folder / "no_package.yaml").write_text("algo:\n  beta: 0.3\n")
    return folder.parent
