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
import traceback
from contextlib import nullcontext, suppress
from itertools import takewhile
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlhf.checks.check import overrides_of, refuse
from rlhf.checks.composing import generator_of
from rlhf.config import catalogue, plugins
from rlhf.config.best_generator import selecting
from rlhf.config.help import help_text
from rlhf.config.mistakes import CONFIG_ERRORS, explain
from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.core.launched import world_size
from rlhf.core.output import prepare_output
from rlhf.experiment import Experiment
from rlhf.launch import search, slurm
from rlhf.launch import sweep as sweeps
from rlhf.launch.child_jobs import job_in_child
from rlhf.launch.command_line import checked_arguments, exit_codes, help_topics, stop
from rlhf.launch.hydra_internals import flags
from rlhf.launch.jobs import announce
from rlhf.launch.sweep import Sweep, begin_job
from rlhf.processes import signals
from rlhf.runs.lock import waiting_claim
from rlhf.runs.naming import folder_of

OmegaConf.register_new_resolver("run_name", lambda *, _root_: folder_of(_root_).name, replace=True)

_CONF = catalogue.conf_dir()

composed = False  # True after the first job has started: a later exception is not about the config


def _run_job(config: DictConfig) -> float | None:
    """Run one job, in this process or in a process of a launcher.

    Returns:
        The value of the metric that a sweeper optimises (`Config.metric`).

    Raises:
        UserError, RunError: the job of a sweep failed.
        SystemExit: a single run failed.
        Interrupted: a signal stopped the run.
    """
    global composed
    composed = True
    slurm.name_rank()
    job = HydraConfig.get()
    overrides = overrides_of(job.overrides)
    sweep = job.mode == RunMode.MULTIRUN
    folder = Path(job.runtime.output_dir)
    # In a process of joblib; other launchers run jobs in the process of the sweep, or one job per process.
    in_child = sweep and "joblib" in job.launcher._target_ and sweeps.current is None
    try:
        with job_in_child() if in_child else nullcontext():
            experiment = Experiment.composed(config, overrides, folder)
            if not sweep:  # `Preflight` has already checked a single run
                return experiment.execute()
            experiment.validate()  # a job of a sweep may run in another process than the command
            begin_job(job.job.num, overrides)
            metric = experiment.config.metric
            if (finished := experiment.prepare(wait=world_size() == 1)) is not None:
                announce(experiment.files, finished, metric)
                return finished["result"].get(metric)
            experiment.hooks = search.pruning_hooks(job.sweeper, Path(job.sweep.dir), overrides, metric)
            return experiment.execute(claim=waiting_claim)
    except Interrupted as reason:
        if signals.active is not None and not in_child:  # the job runs in the process of the command
            raise
        with suppress(OSError):
            folder.rmdir()  # empty if the job was refused because of an earlier signal
        slurm.requeue(reason)
        raise RunError(str(reason)) from None
    except (UserError, RunError) as error:
        with suppress(OSError):
            folder.rmdir()  # Hydra created it; it is empty if the run was refused before it began
        if sweep:  # the sweep continues, and prints the error at its end
            raise
        stop(error)
    except Exception:
        if sweep:  # an exception from another process may arrive without its traceback
            traceback.print_exc()
        raise


train = hydra.main(version_base="1.3", config_path=str(_CONF), config_name="config")(_run_job)


def main() -> None:
    """Run the command line."""
    global composed
    composed = False
    prepare_output()
    slurm.name_rank()
    # DeepSpeed's launcher adds this argument; the variable LOCAL_RANK has the same value.
    sys.argv[1:] = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank=")]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let Hydra raise errors instead of printing them
    sweep = Sweep()
    try:
        with exit_codes():
            plugins.load()
            if (topics := help_topics(sys.argv[1:])) is not None:
                print(help_text(topics))
                return
            sys.argv[1:] = checked_arguments(sys.argv[1:], flags())
            search.register()
            with selecting(generator_of(_overrides())), sweep.watching():
                try:
                    train()
                except (Interrupted, KeyboardInterrupt):
                    sweep.report()
                    raise
                except Exception as error:  # some sweepers raise if jobs fail
                    if not sweep.explains(error):
                        raise
            sweep.end()
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
