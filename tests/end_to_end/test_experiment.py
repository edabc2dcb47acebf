"""Tests of the Python API: experiments, hooks and sweeps equal the command line, and the notebook runs."""

from __future__ import annotations

import json
import re
import shutil
import sys
import traceback
from pathlib import Path

import pytest
from datasets import Dataset

import rlhf.train
from rlhf import Experiment, Hook, RunError, StopRun, Study, UserError, sweep
from rlhf.runs.folder import RunFolder
from tests.docs.notebook import NOTEBOOK, executed
from tests.end_to_end.conftest import assert_same_end

DOCS = Path(__file__).parents[2] / "docs"
LONG = ("algo=dpo", "schedule.total_episodes=64", "schedule.save_every=2")


class Log(Hook):
    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def after_update(self, state, metrics):
        self.calls.append(("update", state.update, int("objective/kl" in metrics)))

    def after_evaluation(self, state, metrics, completions):
        self.calls.append(("evaluation", state.update, len(completions)))

    def after_checkpoint(self, state, folder):
        self.calls.append(("checkpoint", state.update, int((folder / "COMPLETE").is_file())))


class Failing(Hook):
    """Raises an exception at one call."""

    def __init__(self, method: str, update: int) -> None:
        self.place = method, update

    def __getattribute__(self, name):
        if name.startswith("after_"):
            return lambda state, *_: self.fail() if (name, state.update) == self.place else None
        return super().__getattribute__(name)

    def fail(self) -> None:
        raise ValueError("not today")


def test_all_problems_of_a_config_are_reported_together(tmp_path):
    bad = Experiment(
        "algo=dpo", "optim.lr=-1", "algo.beta=-1", "schedule.total_episodes=7", f"output_dir={tmp_path}"
    )
    assert len(bad.problems()) == 3 and bad.status == "not started"
    with pytest.raises(UserError, match=r"(?s)3 problems.*total_episodes.* divisible"):
        bad.run()
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"did you mean optim\.lr\?"):
        Experiment("algo=dpo", "optim.lrr=1")


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: Experiment("progress=none"),
        lambda folder: Experiment("optim.lr=[1"),
        lambda folder: Experiment("epsilon=0.2"),
        lambda folder: Experiment("algo=sft", f"output_dir={folder}").model,
        lambda folder: Experiment.open(folder),
        lambda folder: Study(folder / "absent.yaml"),
        lambda folder: sweep("progress=none"),
    ],
)
def test_a_mistake_in_python_is_one_error_without_the_errors_that_led_to_it(tmp_path, call):
    with pytest.raises(UserError) as refused:
        call(tmp_path)
    text = "".join(traceback.format_exception(refused.value))
    assert text.count("Traceback") == 1 and "hydra.errors" not in text


def test_overrides_are_texts_or_lists_of_texts(tmp_path):
    words = ["algo=dpo", "seed=7", f"output_dir={tmp_path}"]
    plain = Experiment(*words)
    for same in (Experiment(words), Experiment(words[0], words[1:]), Experiment(tuple(words))):
        assert same.overrides == words and same.folder == plain.folder and same.yaml == plain.yaml
    for wrong in (None, {"algo": "dpo"}, ["seed=1", 2], [["seed=1"]], Path("seed=1")):
        for call in (Experiment, sweep, plain.extend, plain.evaluate):
            with pytest.raises(UserError, match="overrides must be texts, or a list of texts"):
                call(wrong)


def test_a_run_in_python_calls_hooks_and_its_results_are_those_of_its_files(
    command, finished, capsys, monkeypatch
):
    log = Log()
    run = Experiment(*command, *LONG, hooks=[log])
    result = run.run()
    assert_same_end(run.files, finished(*LONG))  # hooks change nothing
    assert [call for call in log.calls if call[0] == "update"] == [("update", n, 1) for n in (1, 2, 3, 4)]
    assert ("checkpoint", 2, 1) in log.calls and ("evaluation", 0, 16) in log.calls
    metrics, completions = run.metrics(), run.completions()
    assert list(metrics.index) == [0, 1, 2, 3, 4] and metrics.loc[4, "eval/kl"] == result["eval/kl"]
    assert metrics.index.name == "update" and metrics.index.dtype == int and metrics.index.is_unique
    assert metrics["objective/kl"].notna().sum() == 4
    assert (completions["update"] == 4).sum() == 16
    opened = Experiment.open(run.folder)
    assert opened.result == result == run.run() and opened.status == "finished"
    assert (opened.model / "model.safetensors").is_file()
    once, again = (
        opened.sample(["My uncle", "What"], samples=2, response_length=4, seed=5) for _ in range(2)
    )
    assert list(once["prompt"]) == [0, 0, 1, 1] and once.equals(again)
    assert not once.equals(opened.sample(["My uncle", "What"], samples=2, response_length=4, seed=6))
    with pytest.raises(UserError, match="no chat template"):
        opened.sample([[{"role": "user", "content": "What"}]])
    # the command line finds the run of the API
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["rlhf.train", *command, *LONG])
    with pytest.raises(SystemExit) as end:
        rlhf.train.main()
    assert end.value.code == 0 and f"finished already: {run.folder}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "update", "stopped"),
    [
        ("after_update", 3, 3),
        ("after_checkpoint", 2, 3),
        pytest.param("after_evaluation", 2, 2, marks=pytest.mark.nightly),
    ],
)
def test_a_hook_that_raises_is_named_and_the_run_resumes_from_a_checkpoint(
    method, update, stopped, command, finished
):
    words = (*command, *LONG)
    run = Experiment(*words, hooks=[Failing(method, update)])
    with pytest.raises(RunError, match=rf"hook Failing\.{method} raised ValueError: not today"):
        run.run()
    assert run.files.last_checkpoint() == run.folder / f"checkpoint-{stopped}"
    assert run.status == "unfinished" and not run.result
    resumed = Experiment(*words)
    resumed.resume()
    assert_same_end(resumed.files, finished(*LONG))


def test_a_hook_that_stops_the_run_is_no_failure_and_the_run_resumes(command, finished):
    class Stopping(Hook):
        def after_evaluation(self, state, metrics, completions):
            if state.update == 2:
                raise StopRun("enough")

    run = Experiment(*command, *LONG, hooks=[Stopping()])
    assert run.run() == {} and run.status == "unfinished"
    assert run.files.read_state()["stopped"] == "enough"
    assert run.files.last_checkpoint() == run.folder / "checkpoint-2"
    resumed = Experiment(*command, *LONG)
    resumed.resume()
    assert_same_end(resumed.files, finished(*LONG))
    assert "stopped" not in resumed.files.read_state()


def test_a_hook_that_raises_at_the_end_leaves_a_finished_run(command):
    run = Experiment(*command, "algo=dpo", hooks=[Failing("after_evaluation", 2)])
    with pytest.raises(RunError, match="the run is finished, and its model is complete"):
        run.run()
    assert run.status == "finished" and (run.model / "model.safetensors").is_file()


def test_the_documented_hook_runs_by_its_address(command, tmp_path, monkeypatch, capsys):
    text = (DOCS / "python.md").read_text()
    (code,) = re.findall(r"```python\n# my_hooks.py\n(.*?)```", text, re.S)
    (tmp_path / "my_hooks.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    Experiment(*command, "algo=dpo", "hooks=[my_hooks.py:Announce]").run()
    said = capsys.readouterr().out
    assert "evaluated 16 prompts: win rate" in said and "update 2: KL" in said and "checkpoint: " in said


ROWS = [{"prompt": f"Question {n}: tea?\nAnswer:", "response": f" Heat {n}.", "cups": n} for n in range(24)]


def few_letters(limit):
    def letters(response, cups):
        return -abs(len(set(response)) - limit) / (1 + cups)

    return letters


def test_a_run_of_objects_is_that_of_files_and_the_same_call_resumes_it(command, tmp_path):
    class Stopping(Hook):
        def after_update(self, state, metrics):
            raise StopRun("enough")

    words = [*(word for word in command if not word.startswith("task")), "algo=rloo"]
    run = Experiment(words, dataset=Dataset.from_list(ROWS), reward=few_letters(9), hooks=[Stopping()])
    assert run.run() == {} and run.status == "unfinished"
    again = Experiment(words, dataset=ROWS, reward=few_letters(9))
    assert again.folder == run.folder and again.yaml == run.yaml
    assert again.run() == again.result and again.status == "finished"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(
        "def f(response, cups): return -abs(len(set(response)) - 9) / (1 + cups)\n"
    )
    files = [
        f"task.path={tmp_path / 'rows.jsonl'}",
        "scorer=function",
        f"scorer.path={tmp_path / 'mine.py'}:f",
    ]
    by_hand = Experiment(words, "task=local", files)
    by_hand.run()
    assert_same_end(by_hand.files, again.files)
    others = [
        Experiment(words, dataset=ROWS[1:], reward=few_letters(9)),
        Experiment(words, dataset=ROWS, reward=few_letters(8)),
    ]
    assert len({run.folder, *(other.folder for other in others)}) == 3


def test_a_reward_of_this_process_runs_warns_and_is_refused_where_another_process_scores(command, capsys):
    class Counting:
        calls = 0

        def __call__(self, response):
            self.calls += 1
            return float(len(response))

    counting, other = Counting(), Counting()
    words = (*command, "algo=rloo")
    run = Experiment(*words, reward=counting)
    Experiment(*words, "seed=2", reward=other).validate()  # another object under the same name
    run.run()
    assert counting.calls > 16 and not other.calls and run.status == "finished"
    assert "exists only in this process" in capsys.readouterr().err
    assert run.config.scorer.path.startswith("only_in_this_process:Counting")
    with pytest.raises(UserError, match="generator.annotate=false"):
        Experiment(*words, "schedule.max_lag=1", reward=counting).run()
    assert not Experiment(
        *words, "schedule.max_lag=1", "generator.annotate=false", reward=counting
    ).problems()
    sys.modules.pop("only_in_this_process")
    with pytest.raises(UserError, match=r"make the call Experiment\(\.\.\., reward=<function>\) again"):
        Experiment.open(run.folder).evaluate()


def test_objects_are_refused_beside_other_data_or_another_scorer_before_anything_is_written(
    command, tmp_path
):
    for word, objects in (
        ("task=gsm8k", {"dataset": ROWS}),
        ("task.path=data/tea.jsonl", {"dataset": ROWS}),
        ("scorer=answer", {"reward": few_letters(1)}),
        ("scorer.path=a.py:f", {"reward": few_letters(1)}),
    ):
        with pytest.raises(UserError, match=f"must not be given together with {word} "):
            Experiment("algo=rloo", f"cache_dir={tmp_path}", word, **objects)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="cache_dir must be a folder that can be written"):
        Experiment("algo=rloo", f"cache_dir={file}/cache", dataset=ROWS)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.process
def test_a_sweep_returns_its_runs(command, finished, tmp_path):
    with pytest.raises(UserError, match="optim.lr must be > 0"):
        sweep(*command, "algo=dpo", "optim.lr=1e-4,-1")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    runs = sweep(*command, "algo=dpo", "seed=1,2")
    assert [run.config.seed for run in runs] == [1, 2] and all(run.status == "finished" for run in runs)
    assert_same_end(runs[0].files, finished("algo=dpo"))
    with pytest.raises(UserError, match="hydra/sweeper must be basic"):
        sweep(*command, "hydra/sweeper=search", "seed=1,2")


def test_extend_and_evaluate_use_the_run_folder(finished, tmp_path):
    constant = ("algo=dpo", "schedule.eval_every=1", "schedule.save_every=1", "optim.schedule=constant")
    run = Experiment.open(shutil.copytree(finished(*constant).path, tmp_path / "run"))
    run.extend("schedule.total_episodes=48")
    assert run.config.schedule.total_episodes == 48 and run.metrics().index.max() == 3
    assert list(run.evaluate("eval.prompts=8")["model"])[-1] == "model"
    assert len(run.evaluations()) >= 1
    assert RunFolder(run.folder).finished()


@pytest.mark.nightly
@pytest.mark.process
def test_the_notebook_runs(tmp_path):
    notebook = executed(NOTEBOOK, tmp_path)
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("eval/win_rate" in str(output.get("data", {}).get("text/plain")) for output in shown)
    assert all(output.output_type != "error" for output in shown)
