"""Tests of the commands on a run folder with damaged, missing and unrelated files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf import relabel
from rlhf.core.errors import UserError
from rlhf.experiment import Experiment
from rlhf.launch.preflight import announce
from rlhf.report.runs import find_runs
from rlhf.report.tables import remarks, samples, sections
from rlhf.runs.folder import COMPLETE, RunFolder
from rlhf.runs.resuming import prepare
from rlhf.stages.evaluation import changed, evaluate, run_folder, settings
from rlhf.stages.prerequisites import trained
from rlhf.words.compose import compose, run_name
from tests.model_folders import write_model

CFG = compose([])


def rows(*updates: int, **values: object) -> str:
    return "".join(json.dumps({"update": update, **values}) + "\n" for update in updates)


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    """Return the folder of a finished run, whose checkpoint and final model were evaluated."""
    folder = RunFolder(tmp_path_factory.mktemp("intact") / "run")
    folder.write_config(CFG)
    folder.write_environment()
    folder.write_state({"update": 4, "episode": 64, "finished": True, "result": {CFG.metric: 0.5}})
    folder.metrics.write_text(rows(1, 2, 3, 4, lr=0.1) + rows(4, **{CFG.metric: 0.5}))
    folder.completions.write_text(rows(0, 4, prompt="p", response="r", score=1.0))
    checkpoint = folder.path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / COMPLETE).write_text("{}")
    write_model(folder.model)
    about = settings(CFG, "validation")
    found = [{"model": name, "settings": about} for name in ("checkpoint-3", "model")]
    folder.evaluations.write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder.path


@pytest.fixture
def run(intact, tmp_path) -> Path:
    """Return a copy of the run folder."""
    return Path(shutil.copytree(intact, tmp_path / "run"))


def train(run: Path) -> None:
    state = prepare(RunFolder(run), CFG)
    if state is not None:
        announce(RunFolder(run), state, CFG.metric)


def evaluation(run: Path) -> None:
    folder = run_folder(str(run))
    evaluate(changed(folder), folder)


def extension(run: Path) -> None:
    try:
        Experiment.open(run).extend("schedule.total_episodes=2560")
    except UserError as error:
        if "schedule.total_episodes must be above 5120" not in str(error):
            raise


def report(run: Path) -> None:
    found = find_runs([str(run)])
    for section in sections(found.runs):
        samples(section, 1)
    remarks(sections(found.runs), found)


COMMANDS: dict[str, Callable[[Path], None]] = {
    "train": train, "evaluate": evaluation, "extend": extension, "report": report
}  # fmt: skip


def content(name: str, text: bytes) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes(text)


def as_folder(name: str) -> Callable[[Path], object]:
    return lambda run: ((run / name).unlink(), (run / name).mkdir())


def as_link(name: str) -> Callable[[Path], object]:
    return lambda run: ((run / name).unlink(missing_ok=True), (run / name).symlink_to("nowhere"))


def cut(name: str) -> Callable[[Path], object]:
    return lambda run: os.truncate(run / name, (run / name).stat().st_size // 2)


STATE, CONFIG, METRICS = "trainer_state.json", "config.yaml", "metrics.jsonl"
EVERY = ("train", "evaluate", "extend", "report")
RUNS = ("train", "evaluate", "extend")

# Damage -> the commands that are refused; the other commands ignore the damage.
DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "state null": (content(STATE, b"null"), EVERY),
    "state []": (content(STATE, b"[]"), EVERY),
    "state binary": (content(STATE, b"\xff\x00\x81"), EVERY),
    "state empty": (content(STATE, b""), EVERY),
    "state zeros": (content(STATE, bytes(80)), EVERY),
    "state cut": (cut(STATE), EVERY),
    "state finished without result": (content(STATE, b'{"finished": true}'), RUNS),
    "state with a result that is no number": (
        content(STATE, b'{"finished": true, "result": {"eval/win_rate": "x"}}'), RUNS,
    ),
    "state without counters": (content(STATE, b'{"finished": true, "result": {}}'), ()),
    "state folder": (as_folder(STATE), EVERY),
    "state link to nothing": (as_link(STATE), EVERY),
    "config empty": (content(CONFIG, b""), EVERY),
    "config binary": (content(CONFIG, b"\xff\x00\x81"), EVERY),
    "config no mapping": (content(CONFIG, b"- 1\n"), EVERY),
    "config number": (content(CONFIG, b"5\n"), EVERY),
    "config cut": (cut(CONFIG), EVERY),
    "config with a defaults list of another form": (content(CONFIG, b"defaults: 5\n"), EVERY),
    "config with a defaults entry of another form": (content(CONFIG, b"defaults:\n- {a: 1, b: 2}\n"), EVERY),
    "config folder": (as_folder(CONFIG), EVERY),
    "metrics cut in the middle": (content(METRICS, b'{"update": 1}\n{"upd\n{"update": 2}\n'), ("report",)),
    "metrics binary": (content(METRICS, b"\xff\x00\x81\n"), ("report",)),
    "metrics without update": (content(METRICS, b"{}\n"), ("report",)),
    "metrics folder": (as_folder(METRICS), EVERY),
    "metrics cut": (cut(METRICS), ()),
    "completions folder": (as_folder("completions.jsonl"), RUNS),
    "completions without update": (content("completions.jsonl", b"{}\n"), ("evaluate",)),
    "completions garbage": (content("completions.jsonl", b"garbage\n"), ("evaluate",)),
    "environment garbage": (content("environment.json", b"garbage"), ("report",)),
    "environment list": (content("environment.json", b"[[1, 2]]"), ("report",)),
    "environment folder": (as_folder("environment.json"), EVERY),
    "log folder": (lambda run: (run / "train.log").mkdir(), RUNS),
    "evaluations garbage": (content("evaluations.jsonl", b"garbage\n"), ("evaluate",)),
    "evaluations without settings": (content("evaluations.jsonl", b'{"model": "model"}\n'), ("evaluate",)),
    "evaluations folder": (as_folder("evaluations.jsonl"), ("evaluate",)),
    "failed batch without update": (content("failed_batch.json", b"{}"), ()),
    "model missing": (lambda run: shutil.rmtree(run / "model"), ("evaluate",)),
    "model cut": (cut("model/model.safetensors"), ("evaluate",)),
    "model config garbage": (content("model/config.json", b"garbage"), ("evaluate",)),
    "model file": (lambda run: (shutil.rmtree(run / "model"), (run / "model").touch()), ("evaluate",)),
    "ranks garbage": (content("checkpoint-3/ranks.json", b"garbage"), ()),
    "file .tmp-checkpoint-3": (lambda run: (run / ".tmp-checkpoint-3").touch(), ()),
    "file checkpoint-5": (lambda run: (run / "checkpoint-5").touch(), ()),
    "folder checkpoint-foo": (lambda run: (run / "checkpoint-foo").mkdir(), ()),
    "folder checkpoint-4 without marker": (lambda run: (run / "checkpoint-4").mkdir(), ()),
    "copy checkpoint-007": (lambda run: shutil.copytree(run / "checkpoint-3", run / "checkpoint-007"), ()),
    "copy checkpoint-3-x": (lambda run: shutil.copytree(run / "checkpoint-3", run / "checkpoint-3-x"), ()),
    "link checkpoint-5 to nothing": (as_link("checkpoint-5"), ()),
    "folder as marker": (lambda run: (run / "checkpoint-5" / COMPLETE).mkdir(parents=True), ()),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_an_intact_folder_is_not_refused(run, command, capsys):
    COMMANDS[command](run)
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_file_is_named_with_a_remedy_and_unrelated_files_are_ignored(run, command, damage):
    strike, refused = DAMAGE[damage]
    strike(run)
    if command not in refused:
        COMMANDS[command](run)
        return
    with pytest.raises(UserError) as error:
        COMMANDS[command](run)
    message = str(error.value)
    assert str(run) in message and ("; " in message or "set run=" in message), message


def test_a_folder_without_config_is_refused_unless_its_name_identifies_the_run(run):
    (run / CONFIG).unlink()
    with pytest.raises(UserError, match=r"config\.yaml must be the config that a run wrote, .*No such file"):
        train(run)
    train(run.rename(run.with_name(run_name(CFG))))


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_finished_stage_without_a_complete_model_stops_the_pipeline(run, damage):
    stage = trained("SFT model", RunFolder(run), lambda: None)
    assert stage.done()
    DAMAGE[f"model {damage}"][0](run)
    with pytest.raises(
        UserError, match=rf"{run} must have a complete model, .*: rm -r {run / STATE}, then the"
    ):
        stage.done()


@pytest.mark.parametrize("text", ["null", "{", "", "[]"])
def test_a_damaged_report_of_relabelled_pairs_is_named_with_the_remedy(tmp_path, text):
    (tmp_path / "relabel.json").write_text(text)
    with pytest.raises(UserError, match=rf"relabel\.json must be a JSON object.* again: rm -r {tmp_path}"):
        relabel.finished(CFG, tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("train.json", "{", "train.json must be a JSON object, .*: rm -r "),
        (
            "train.jsonl",
            "garbage\n",
            "train.jsonl must have a JSON object with index, scores .* in line 1; .*1d",
        ),
        ("train.jsonl", '{"index": 1}\n', "train.jsonl must have a JSON object with index, scores "),
    ],
)
def test_damaged_scores_of_an_interrupted_relabelling_are_named_with_the_remedy(tmp_path, name, text, said):
    about = {"split": "train"}
    assert relabel.begin(tmp_path, "train", about) == {}
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        relabel.begin(tmp_path, "train", about)
