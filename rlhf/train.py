"""Command `python -m rlhf.train [group=option ...] [key=value ...]`: train a model (see `--help`).

    compose the config (Hydra) -> check it (rlhf.launch.preflight) -> run (rlhf.experiment.Experiment)

The checks come before the run folder is created. Only the run imports torch; the steps before it do not.

Exit codes:
    0: finished, or already finished.
    1: the run stopped with `error: ...`, or an unexpected error with its traceback.
    2: invalid input or configuration, with `error: ...`.
    75: interrupted by SIGTERM, SIGUSR1 or SIGUSR2; the same command resumes the run (EX_TEMPFAIL).
    130: interrupted by Ctrl-C; the same command resumes the run.
    143: ended at once by a second SIGTERM.

A sweep continues if a job fails, and then ends with 1 or 2.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from rlhf.checks.check import generator_of, overrides_of, refuse
from rlhf.config.root import selecting
from rlhf.core.errors import RunError, UserError
from rlhf.experiment import Experiment
from rlhf.launch.command_line import checked_arguments, exit_codes, flags, help_topics, name_rank, stop
from rlhf.launch.sweep import Sweep, run_job
from rlhf.terminal.console import prepare_output
from rlhf.words import catalogue
from rlhf.words.help import help_text
from rlhf.words.mistakes import CONFIG_ERRORS, explain

_CONF = catalogue.conf_dir()

composed = False  # True after the first job has started: a later exception is not about the config


def _run_job(config: DictConfig) -> float | None:
    """Carry out the run of the command, or a job of a sweep, in this process or in that of a launcher.

    Returns:
        The value of the metric that a sweeper optimises (`Config.metric`).

    Raises:
        UserError, RunError: the job of a sweep failed; the sweep continues, and prints the error at its end.
        SystemExit: the run of the command failed.
        Interrupted: a signal stopped the run.
    """
    global composed
    composed = True
    name_rank()
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    try:
        if job.mode == RunMode.MULTIRUN:
            return run_job(config, folder)
        return Experiment.composed(config, overrides_of(job.overrides), folder).execute()
    except (UserError, RunError) as error:
        with suppress(OSError):
            folder.rmdir()  # Hydra created it; it is empty if the run was refused before it began
        if job.mode == RunMode.MULTIRUN:
            raise
        stop(error)


train = hydra.main(version_base="1.3", config_path=str(_CONF), config_name="config")(_run_job)


def main() -> None:
    """Run the command line."""
    global composed
    composed = False
    prepare_output()
    name_rank()
    # DeepSpeed's launcher adds this argument; the variable LOCAL_RANK has the same value.
    sys.argv[1:] = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank=")]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let Hydra raise errors instead of printing them
    try:
        with exit_codes():
            catalogue.load_plugins()
            if (topics := help_topics(sys.argv[1:])) is not None:
                print(help_text(topics))
                return
            sys.argv[1:] = checked_arguments(sys.argv[1:], flags())
            with selecting(generator_of(_overrides())), Sweep().watching():
                train()
    except CONFIG_ERRORS as error:
        if composed:
            raise
        multirun = any(word[:3] in ("-m", "--m") for word in sys.argv)  # --multirun may be abbreviated
        refuse([explain(error, _overrides(), multirun)])


def _overrides() -> list[str]:
    """Return the overrides of the command line, which `checked_arguments` puts before the flags."""
    return list(takewhile(lambda argument: not argument.startswith("-"), sys.argv[1:]))


if __name__ == "__main__":
    # `_run_job` is pickled for jobs in other processes, so it must belong to rlhf.train, not to __main__.
    from rlhf.train import main

    main()
