"""Tests of run folders, validation before the start, resuming, finished runs, signals and exit codes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rlhf.core.errors import RunError, UserError
from rlhf.processes.signals import interruptible
from rlhf.runs.folder import COMPLETE
from tests.model_folders import write_model


def run_folders(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "outputs").iterdir() if path.is_dir())


def finish(cfg, folder):
    folder.write_state({"finished": True, "result": {"eval/win_rate": 0.25}})
    write_model(folder.model)
    return 0.25


def test_a_run_gets_its_config_and_its_folder(command, tmp_path):
    answer = command("seed=7", "schedule.max_lag=1")
    ((cfg, folder),) = answer.runs
    assert answer.code == 0 and cfg.seed == 7
    assert folder.path == tmp_path / "outputs" / folder.path.name and folder.path.is_dir()
    assert folder.path.name.startswith("tldr_mini-pythia-dpo-hf-lag1-seed7-")


def test_the_same_command_has_the_same_folder_alone_and_in_a_sweep(command, tmp_path):
    command("seed=2")
    assert command("-m", "seed=1,2").code == 0
    assert len(run_folders(tmp_path)) == 2


def test_a_run_that_an_earlier_version_started_under_another_name_is_resumed(command, tmp_path):
    words = ["seed=5", "schedule.max_lag=1"]
    ((cfg, folder),) = command(*words).runs
    earlier = folder.path.with_name(folder.path.name.replace("pythia", "earlier"))
    folder.path.rename(earlier)
    folder = type(folder)(earlier)
    folder.write_config(cfg)
    answer = command(*words)
    assert answer.runs[0][1].path == earlier and f"continues in {earlier.relative_to(tmp_path)}" in answer.out
    finish(cfg, folder)
    assert command(*words).runs == [] and run_folders(tmp_path) == [earlier.name]


def test_hydra_run_dir_sets_the_run_folder(command, tmp_path):
    answer = command("hydra.run.dir=elsewhere/here")
    assert answer.runs[0][1].path == tmp_path / "elsewhere" / "here"


def test_waiting_threads_are_passive_and_tokenizers_are_not_parallel(command):
    seen = []
    command(during=lambda cfg, folder: seen.append(dict(os.environ)) or 0.0)
    assert (seen[0]["OMP_WAIT_POLICY"], seen[0]["TOKENIZERS_PARALLELISM"]) == ("PASSIVE", "false")


def test_finished_run_is_reported_and_skipped(command):
    command(during=finish)
    answer = command()
    assert answer.code == 0 and not answer.runs
    assert (
        "finished already: " in answer.out and "eval/win_rate 0.25" in answer.out and "model: " in answer.out
    )


def test_unfinished_run_is_started_again_in_its_folder(command, tmp_path):
    first = command(during=lambda cfg, folder: folder.write_state({"finished": False, "update": 3}) or 0.0)
    second = command("resume=auto")
    assert second.runs[0][1] == first.runs[0][1] and len(run_folders(tmp_path)) == 1


def test_resume_never_moves_the_old_run_to_a_numbered_folder(command, tmp_path):
    name = command(during=finish).runs[0][1].path.name
    for _ in range(2):
        answer = command("resume=never", during=finish)
        assert answer.code == 0 and len(answer.runs) == 1 and "moved the existing run" in answer.err
    assert run_folders(tmp_path) == [name, f"{name}.old-1", f"{name}.old-2"]
    assert (tmp_path / "outputs" / f"{name}.old-1" / "trainer_state.json").is_file()


def test_requeued_job_keeps_its_run_folder_with_resume_never(command, monkeypatch, tmp_path):
    command("resume=never", during=finish)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    command("resume=never")
    assert len(run_folders(tmp_path)) == 1


def test_resume_must_requires_a_complete_checkpoint(command):
    folder = command().runs[0][1]
    checkpoint = folder.path / "checkpoint-10"
    checkpoint.mkdir()
    refused = command("resume=must")
    assert refused.code == 2 and "no complete checkpoint in it" in refused.err and not refused.runs
    (checkpoint / COMPLETE).touch()
    assert len(command("resume=must").runs) == 1


def test_sweep_with_invalid_jobs_starts_no_job_and_lists_the_invalid_ones(command, tmp_path):
    answer = command("-m", "seed=1,2", "optim.lr=1e-4,0", "eval.prompts=8")
    assert answer.code == 2 and not answer.runs and not list(tmp_path.iterdir())
    assert "error: 2 problems" in answer.err
    assert "  - seed=1 optim.lr=0: optim.lr must be > 0" in answer.err
    assert "  - seed=2 optim.lr=0: optim.lr must be > 0" in answer.err


@pytest.mark.parametrize("sweep", ["algo=dpo,dpoo", "algo.beta=0.1,high", "+algo.beat=1,2"])
def test_sweep_with_a_job_that_does_not_compose_starts_no_job(command, tmp_path, sweep):
    answer = command("-m", sweep)
    assert answer.code == 2 and not answer.runs and not list(tmp_path.iterdir())
    assert "Traceback" not in answer.err and "must be" in answer.err


def fail(error):
    def during(cfg, folder):
        if cfg.seed == 1:
            raise error
        return 0.5

    return during


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("model.policy must fit"), 2), (RunError("stopped"), 1)]
)
def test_expected_error_of_a_run_is_reported_without_a_traceback(command, error, code):
    answer = command(during=fail(error))
    assert answer.code == code and answer.err in ("error: model.policy must fit\n", "error: stopped\n")


def test_unexpected_error_of_a_run_keeps_its_traceback(command):
    with pytest.raises(ZeroDivisionError):
        command(during=lambda cfg, folder: 1 / 0)
    with pytest.raises(ValueError, match="from within"):  # it is not reported as a config error
        command(during=fail(ValueError("from within")))


def test_ctrl_c_exits_with_code_130(command):
    assert command(during=fail(KeyboardInterrupt())).code == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_ends_the_command_with_exit_code_75(command, number):
    answer = command(during=lambda cfg, folder: signal.raise_signal(number))
    assert answer.code == os.EX_TEMPFAIL == 75 and "Traceback" not in answer.err
    assert answer.err.startswith(f"interrupted by {number.name}")
    assert "the same command resumes the run" in answer.err
    assert signal.getsignal(number) is signal.SIG_DFL


def test_signal_ends_a_sweep_and_the_remaining_jobs_are_not_started(command):
    answer = command("-m", "seed=1,2", during=lambda cfg, folder: signal.raise_signal(signal.SIGTERM))
    assert answer.code == os.EX_TEMPFAIL and [cfg.seed for cfg, _ in answer.runs] == [1]

    def finishes_despite_the_signal(cfg, folder):
        with interruptible() as interruption:
            interruption.defer()
            signal.raise_signal(signal.SIGTERM)
        return finish(cfg, folder)

    answer = command("-m", "seed=1,2", during=finishes_despite_the_signal)
    assert answer.code == os.EX_TEMPFAIL
    assert [folder.finished() is not None for _, folder in answer.runs] == [True, False]
    assert command("seed=3", during=finishes_despite_the_signal).code == 0, "a finished run needs no resume"


def test_exit_codes_of_the_run_pass_through(command):
    assert command(during=fail(SystemExit(5))).code == 5


def test_only_the_first_rank_prints_and_moves_folders(command, monkeypatch, tmp_path):
    command(during=finish)
    monkeypatch.setenv("RANK", "1")
    assert command("resume=never").err == "" and len(run_folders(tmp_path)) == 1


def test_sweep_writes_its_settings_next_to_the_run_folders(command, tmp_path):
    command("-m", "seed=1")
    assert (tmp_path / "outputs" / "multirun.yaml").is_file()
