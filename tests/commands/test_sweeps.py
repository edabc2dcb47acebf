"""Tests of sweeps: unfinished jobs are started, and failed jobs are listed without stopping the others."""

from __future__ import annotations

import os
import shutil

import pytest

from rlhf.core.errors import RunError, UserError
from tests.commands.test_jobs import fail, finish, run_folders


def test_finished_jobs_are_not_started(command):
    command("-m", "seed=1,2", during=finish)
    answer = command("-m", "seed=1,2,3")
    assert [cfg.seed for cfg, _ in answer.runs] == [3]
    assert answer.out.count("finished already") == 2 and answer.out.count("job 3 of 3: seed=3") == 1


def test_a_sweep_numbers_its_jobs_and_ends_with_a_table(command):
    answer = command("-m", "seed=1,2", during=finish)
    told = answer.out.splitlines()
    assert [line for line in told if line.startswith("job ")][:2] == [
        "job 1 of 2: seed=1",
        "job 2 of 2: seed=2",
    ]
    table = told[told.index("job  eval/win_rate  status    values") :]
    assert table[1] == "  1          0.250  finished  seed=1"
    assert table[2] == f"     outputs/{answer.runs[0][1].path.name}"
    assert table[-1] == "compare: python -m rlhf.report outputs"


def test_a_sweep_of_one_job_has_no_table(command):
    assert "compare:" not in command("-m", "seed=1", during=finish).out


def test_resume_never_starts_finished_jobs_again(command):
    command("-m", "seed=1,2", during=finish)
    assert len(command("-m", "seed=1,2", "resume=never").runs) == 2


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("model.policy must fit"), 2, "model.policy must fit"),
        (RunError("the loss was nan"), 1, "the loss was nan"),
        (ArithmeticError("of our making"), 1, "ArithmeticError: of our making"),
    ],
)
def test_jobs_that_fail_are_listed_at_the_end_and_the_others_are_kept(command, tmp_path, error, code, text):
    def during(cfg, folder):
        if cfg.seed == 2:
            raise error
        return finish(cfg, folder)

    answer = command("-m", "seed=1,2,3", during=during)
    assert answer.code == code and [cfg.seed for cfg, _ in answer.runs] == [1, 2, 3]
    folder = answer.runs[1][1].path.name
    listed = answer.err.partition("error: 1 of 3 jobs failed; the others are kept")[2].splitlines()
    assert listed[1:] == [f"  - seed=2: {text}", f"    outputs/{folder}"]
    assert ("Traceback" in answer.err) == isinstance(error, ArithmeticError)

    again = command("-m", "seed=1,2,3", during=finish)
    assert again.code == 0 and [cfg.seed for cfg, _ in again.runs] == [2]


def test_sweep_with_user_errors_and_run_errors_exits_with_code_1(command):
    def during(cfg, folder):
        raise UserError("invalid value") if cfg.seed == 1 else RunError("it stopped")

    assert command("-m", "seed=1,2", during=during).code == 1


def test_batches_after_a_failed_batch_still_run(command):
    answer = command("-m", "seed=1,2,3", "hydra.sweeper.max_batch_size=1", during=fail(RunError("stopped")))
    assert answer.code == 1 and [cfg.seed for cfg, _ in answer.runs] == [1, 2, 3]


def test_jobs_with_the_same_run_folder_run_once(command, tmp_path):
    answer = command("-m", "generator.threads=1,2", "seed=1", during=finish)
    assert answer.code == 0 and len(answer.runs) == len(run_folders(tmp_path)) == 1
    assert "generator.threads=2: the same run as generator.threads=1" in answer.out


def test_ctrl_c_ends_a_sweep_and_earlier_failures_are_reported(command):
    def during(cfg, folder):
        raise RunError("it stopped") if cfg.seed == 1 else KeyboardInterrupt

    answer = command("-m", "seed=1,2,3", "hydra.sweeper.max_batch_size=1", during=during)
    assert answer.code == 130 and [cfg.seed for cfg, _ in answer.runs] == [1, 2]
    assert "it stopped" in answer.err and "interrupted by Ctrl-C" in answer.err.splitlines()[-1]
    assert "seed=1" in answer.out.partition("status")[2], "the table lists the jobs so far"


@pytest.mark.parametrize("launcher", ["slurm", "local"])
def test_launcher_submits_nothing_when_all_runs_are_finished(command, launcher, monkeypatch, tmp_path):
    command("-m", "seed=1,2", during=finish)
    monkeypatch.setenv("PATH", str(tmp_path))  # no sbatch
    answer = command("-m", "seed=1,2", f"hydra/launcher={launcher}")
    assert answer.code == 0 and answer.out.count("finished already") == 2


def test_slurm_launcher_without_slurm_is_reported(command, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = command("-m", "seed=1", "hydra/launcher=slurm")
    assert answer.code == 2 and not answer.runs
    assert answer.err.startswith("error: hydra/launcher=slurm needs SLURM (sbatch is not found here)")


def test_time_limit_not_longer_than_the_signal_delay_is_rejected(command, monkeypatch, tmp_path_factory):
    sbatch = tmp_path_factory.mktemp("bin") / "sbatch"  # the test submits nothing, so it needs no SLURM
    sbatch.write_text("#!/bin/sh\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=os.pathsep)
    limit = ["hydra.launcher.timeout_min=5", "hydra.launcher.signal_delay_s=300"]
    answer = command("-m", "seed=1", "hydra/launcher=slurm", *limit)
    assert answer.code == 2
    assert "hydra.launcher.timeout_min must be longer than hydra.launcher.signal_delay_s" in answer.err


def test_optuna_search_maximises_and_continues_after_a_failed_trial(command, tmp_path):
    tried = []

    def during(cfg, folder):
        tried.append(cfg.optim.lr)
        if len(tried) == 2:
            raise RunError("it stopped")
        folder.write_state({"finished": True, "result": {"eval/win_rate": cfg.optim.lr}})
        return cfg.optim.lr

    words = ["-m", "hydra/sweeper=search", "hydra.sweeper.n_trials=4", "optim.lr=interval(0.0001,0.01)"]
    answer = command(*words, during=during)
    assert answer.code == 1 and "1 of 4 jobs failed" in answer.err and len(tried) == 4
    best = (tmp_path / "outputs" / "optimization_results.yaml").read_text()
    assert str(max(lr for lr in tried if lr != tried[1])) in best

    shutil.rmtree(answer.runs[1][1].path, ignore_errors=True)  # an empty folder is removed already
    again = command(*words, during=during)
    assert again.out.count("finished already") >= 1, (
        "with the same seed, the search proposes the same runs until results differ"
    )


@pytest.mark.parametrize(
    ("interval", "code", "text"), [("1e-4,1e-2", 1, "it stopped"), ("-2,-1", 2, "optim.lr must be > 0")]
)
def test_search_lists_all_trials_when_every_trial_fails(command, interval, code, text):
    words = ["-m", "hydra/sweeper=search", "hydra.sweeper.n_trials=2", f"optim.lr=interval({interval})"]
    answer = command(*words, during=fail(RunError("it stopped")))
    assert answer.code == code and len(answer.runs) == (2 if code == 1 else 0)
    assert answer.err.partition("error: 2 of 2 jobs failed")[2].count(text) == 2, answer.err
