"""The table at the end of a sweep."""

import json

from rlhf.core.errors import RunError
from rlhf.launch import sweep
from rlhf.launch.preflight import Job
from rlhf.launch.search import begin_job
from rlhf.launch.sweep import Sweep, lines
from rlhf.runs.folder import RunFolder
from rlhf.terminal import progress


def row(number, folder, win_rate=None, **more):
    folder.mkdir()
    if win_rate is not None:
        state = {"finished": True, "result": {"eval/win_rate": win_rate}}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    return Job(
        number=number, label=f"seed={number}", folder=RunFolder(folder), metric="eval/win_rate", **more
    )


def test_the_table_has_result_status_values_and_folder_of_every_job(tmp_path):
    rows = [
        row(1, tmp_path / "a", 0.8478),
        row(2, tmp_path / "b", error=RunError("it stopped")),
        row(3, tmp_path / "c"),
        row(4, tmp_path / "d", 0.5, status="finished before"),
        Job(number=5, label="seed=5 optim.lr=0", error=RunError("it stopped")),
    ]
    assert list(lines(rows)) == [
        "job  eval/win_rate  status           values",
        "  1          0.848  finished         seed=1",
        f"     {tmp_path}/a",
        "  2                 failed           seed=2",
        f"     {tmp_path}/b",
        "  3                 unfinished       seed=3",
        f"     {tmp_path}/c",
        "  4          0.500  finished before  seed=4",
        f"     {tmp_path}/d",
        "  5                 failed           seed=5 optim.lr=0",
    ]


def test_a_run_that_a_hook_stopped_has_the_reason_as_its_status(tmp_path):
    job = row(1, tmp_path / "a")
    job.folder.write_state({"finished": False, "stopped": "pruned"})
    assert next(line for line in lines([job]) if "pruned" in line).split() == ["1", "pruned", "seed=1"]


def test_jobs_with_different_metrics_name_the_metric_in_each_row(tmp_path):
    other = row(2, tmp_path / "b")
    other.metric = "eval/accuracy"
    assert next(lines([row(1, tmp_path / "a", 0.5), other])).split() == ["job", "result", "status", "values"]
    assert "eval/win_rate 0.500" in list(lines([row(3, tmp_path / "c", 0.5), other]))[1]


def test_the_title_of_a_job_has_its_number_and_the_values_that_differ():
    made = Sweep()
    made.total = 4
    made.jobs = [
        Job(number=number, label=f"seed={number}", overrides=["algo=dpo", f"seed={number}"])
        for number in (3, 6)
    ]
    assert made.title(["algo=dpo", "seed=3"]) == "job 3 of 4: seed=3"
    assert made.title(["algo=dpo", "seed=6"]) == "job 6: seed=6", "the number of trials is not known"


def test_jobs_that_share_a_terminal_have_numbers_in_their_titles(monkeypatch, capsys):
    monkeypatch.setattr(progress, "job", "")
    begin_job(1, ["algo=dpo", "seed=2"])  # in a process of a launcher
    assert progress.prefix() == "job 2 " and capsys.readouterr().out == "job 2: algo=dpo seed=2\n"
    monkeypatch.setattr(sweep, "current", Sweep())
    begin_job(1, ["seed=2"])
    assert progress.prefix() == ""
