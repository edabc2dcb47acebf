"""train.log: the error that ended a run, and the log of a run that is a stage of another run."""

import logging

import pytest

from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.runs.folder import RunFolder, run_log, setup_logging
from rlhf.terminal.console import transcript


@pytest.fixture(autouse=True)
def logger(monkeypatch):
    log = logging.getLogger("rlhf")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(logging.getLogger("py.warnings"), "handlers", [])
    yield log
    logging.captureWarnings(False)


def own_reward():
    raise KeyError("no such word")


def fail_in(folder, error):
    with pytest.raises(type(error)), run_log():
        setup_logging(folder)
        raise error


def test_an_error_with_a_cause_is_written_with_the_traceback_of_the_cause(tmp_path):
    folder = RunFolder(tmp_path)
    try:
        try:
            own_reward()
        except KeyError as cause:
            raise RunError("scorer.path=my.py:reward raised KeyError") from cause
    except RunError as error:
        fail_in(folder, error)
    text = folder.log.read_text()
    assert "ERROR scorer.path=my.py:reward raised KeyError\n" in text
    assert "in own_reward" in text and "KeyError: 'no such word'" in text and "RunError" not in text


def test_a_mistake_of_the_user_is_written_without_traceback(tmp_path):
    folder = RunFolder(tmp_path)
    fail_in(folder, UserError("task.path must exist"))
    assert folder.log.read_text().endswith("ERROR task.path must exist\n")
    assert "Traceback" not in folder.log.read_text()


def test_an_unexpected_error_is_written_with_its_traceback(tmp_path):
    folder = RunFolder(tmp_path)
    fail_in(folder, ZeroDivisionError("division by zero"))
    assert "ERROR unexpected error: ZeroDivisionError\nTraceback" in folder.log.read_text()


def test_ctrl_c_is_written_and_an_interruption_is_not_written_twice(tmp_path):
    first, second = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    fail_in(first, KeyboardInterrupt())
    fail_in(second, Interrupted("interrupted by SIGTERM"))
    assert "ERROR interrupted by Ctrl-C" in first.log.read_text() and second.log.read_text() == ""


def test_after_a_stage_messages_go_to_the_log_of_the_run_again(tmp_path, logger, capsys):
    run, stage = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "stage")
    before = logger.handlers[:]
    with run_log():
        setup_logging(run)
        with run_log():
            setup_logging(stage)
            transcript.info("in the stage")
        transcript.info("in the run")
    assert logger.handlers == before
    assert "in the stage" in stage.log.read_text() and "in the run" not in stage.log.read_text()
    assert "in the run" in run.log.read_text() and "in the stage" not in run.log.read_text()
    assert capsys.readouterr().out == "", "these messages are for train.log only"


def test_an_error_before_the_log_exists_is_not_printed_a_second_time(capsys):
    with pytest.raises(UserError), run_log():
        raise UserError("model.policy must fit")
    assert capsys.readouterr().err == ""


def test_a_warning_is_one_line_of_a_pipe(tmp_path, logger, capsys):
    with run_log():
        setup_logging(RunFolder(tmp_path))
        logger.warning("word " * 50 + "[end]")
    assert capsys.readouterr().out == "warning: " + "word " * 50 + "[end]\n"


def test_a_full_disk_below_train_log_does_not_replace_the_error_of_the_run(tmp_path):
    folder = RunFolder(tmp_path)
    folder.log.symlink_to("/dev/full")
    with pytest.raises(RunError, match="cannot write metrics"), run_log():
        setup_logging(folder)
        raise RunError("cannot write metrics.jsonl")
