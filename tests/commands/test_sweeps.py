"""Tests of sweeps: unfinished jobs are started, and failed jobs are listed without stopping the others."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
import yaml

from rlhf.core.errors import RunError, UserError
from tests.commands.test_jobs import fail, finish, run_folders


def test_a_sweep_runs_every_combination_and_skips_finished_runs(command, tmp_path):
    first = command("-m", "algo=dpo,sft", "seed=1", during=finish)
    assert first.code == 0 and len(first.runs) == len(run_folders(tmp_path)) == 2
    second = command("-m", "algo=dpo,sft", "seed=1,2")
    assert [cfg.seed for cfg, _ in second.runs] == [2, 2] and second.out.count("finished already") == 2
    assert second.out.count("job 2 of 4: algo=dpo seed=2") == 1


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


def test_beside_other_runs_a_sweep_compares_its_own_runs_only(command, tmp_path):
    (tmp_path / "outputs" / "other").mkdir(parents=True)
    (tmp_path / "outputs" / "other" / "config.yaml").touch()
    answer = command("-m", "seed=1,2", during=finish)
    own = [f"outputs/{folder.path.name}" for _, folder in answer.runs]
    assert answer.out.splitlines()[-1] == f"compare: python -m rlhf.report {' '.join(own)}"


def test_a_sweep_of_one_job_has_no_table(command):
    assert "compare:" not in command("-m", "seed=1", during=finish).out


def test_resume_never_starts_finished_jobs_again(command, tmp_path):
    command("-m", "seed=1,2", during=finish)
    answer = command("-m", "seed=1,2", "resume=never", during=finish)
    assert len(answer.runs) == 2 and sum(".old-1" in name for name in run_folders(tmp_path)) == 2


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


SEARCH = ("-m", "hydra/sweeper=search", "hydra.sweeper.n_trials=4", "optim.lr=interval(0.0001,0.01)")


def found(folder):
    return yaml.safe_load((folder / "outputs" / "optimization_results.yaml").read_text())


def learned(cfg, folder):
    """Finish a run whose win rate is its learning rate."""
    folder.write_state({"finished": True, "result": {"eval/win_rate": cfg.optim.lr}})
    return cfg.optim.lr


def test_a_search_continues_after_a_failed_trial_and_the_same_command_repeats_that_trial(command, tmp_path):
    tried = []

    def during(cfg, folder):
        tried.append(cfg.optim.lr)
        if len(tried) == 2:
            raise RunError("it stopped")
        return learned(cfg, folder)

    answer = command(*SEARCH, "seed=3", during=during)
    assert answer.code == 1 and "1 of 4 jobs failed" in answer.err and len(set(tried)) == 4
    best = max(lr for lr in tried if lr != tried[1])
    assert found(tmp_path) == {"name": "optuna", "best_params": {"optim.lr": best}, "best_value": best}
    assert f"train with these values: python -m rlhf.train seed=3 optim.lr={best:.6g}" in answer.out
    assert f"job 1 of 4: optim.lr={tried[0]:.6g}" in answer.out, "labels have the swept values only"
    table = answer.out.partition("status")[2]
    assert f"failed    optim.lr={tried[1]:.6g}" in table and "(3 finished, 1 failed)" not in table

    again = command(*SEARCH, "seed=3", during=during)
    assert again.code == 0 and [cfg.optim.lr for cfg, _ in again.runs] == [tried[1]]
    assert found(tmp_path)["best_value"] == max(tried[:4])
    done = command(*SEARCH, "seed=3")
    assert done.code == 0 and not done.runs and ": 4 finished\n" in done.out
    more = command(*SEARCH, "seed=3", "hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=2", during=during)
    assert len(more.runs) == 2 and "job 6 of 6" in more.out, "n_trials counts the trials of all sessions"


def test_a_search_stopped_by_a_signal_continues_with_the_values_of_the_interrupted_trial(command):
    def during(cfg, folder):
        if len(interrupted) == 2:
            signal.raise_signal(signal.SIGTERM)
        interrupted.append(cfg.optim.lr)
        return learned(cfg, folder)

    interrupted = []
    stopped = command(*SEARCH, during=during)
    assert stopped.code == os.EX_TEMPFAIL and len(stopped.runs) == 3
    again = command(*SEARCH, during=learned)
    assert [folder for _, folder in again.runs][0] == stopped.runs[2][1] and len(again.runs) == 2


def test_search_lists_all_trials_when_every_trial_fails(command):
    answer = command(*SEARCH, "hydra.sweeper.n_trials=2", during=fail(RunError("it stopped")))
    assert answer.code == 1 and len(answer.runs) == 2
    assert answer.err.partition("error: 2 of 2 jobs failed")[2].count("it stopped") == 2, answer.err
    few = command(*SEARCH, "hydra.sweeper.max_failure_rate=0.5", during=fail(RunError("it stopped")))
    assert few.code == 1 and len(few.runs) == 1 and "the search stops: 1 of 1 trials failed" in few.out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["optim.lr=interval(-2,-1)"], "optim.lr=-1.5: optim.lr must be > 0"),
        (["optim.lr=interval(2,1)"], "optim.lr must have valid bounds"),
        (["optim.lr=1e-4"], "hydra/sweeper=search needs a key with several values"),
        (["hydra.sweeper.n_trials=0"], "hydra.sweeper.n_trials must be >= 1"),
        (
            ["hydra.sweeper.direction=maximize", "objective_metric=eval/kl"],
            "hydra.sweeper.direction must be minimize",
        ),
        (["hydra.sweeper.sampler=tpee"], "hydra.sweeper.sampler must be one of tpe, random"),
    ],
)
def test_an_invalid_search_starts_no_run_and_leaves_no_file(command, tmp_path, words, text):
    answer = command(*SEARCH, *words)
    assert answer.code == 2 and not answer.runs and not list(tmp_path.iterdir())
    assert text in answer.err and "Traceback" not in answer.err


def test_a_search_without_optuna_names_the_command_that_installs_it(command, monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "optuna" else find_spec(name)
    )
    answer = command(*SEARCH)
    assert answer.code == 2 and "pip install -e '.[optuna]'" in answer.err and not list(tmp_path.iterdir())


def test_a_study_of_another_search_is_refused(command):
    study = ("hydra.sweeper.study_name=mine", "hydra.sweeper.storage=mine.log")
    assert command(*SEARCH, *study, during=learned).code == 0
    other = command(*SEARCH, *study, "algo=rloo", during=learned)
    assert other.code == 2 and not other.runs and "whose runs differ" in other.err


def test_sweep_with_user_errors_and_run_errors_exits_with_code_1(command):
    def during(cfg, folder):
        raise UserError("invalid value") if cfg.seed == 1 else RunError("it stopped")

    assert command("-m", "seed=1,2", during=during).code == 1
