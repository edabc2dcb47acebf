"""Sweeps in Python: `python -m rlhf.train -m` as a child process, and its runs as experiments.

from rlhf import sweep

runs = sweep("algo=dpo,ppo", "seed=1,2,3", "hydra/launcher=joblib")
{run.config.algo.name: run.result for run in runs}
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf.config.root import selecting
from rlhf.core.errors import RunError, UserError
from rlhf.experiment import Experiment
from rlhf.launch.command_line import multirun_config, uses_basic_sweeper
from rlhf.launch.preflight import experiment_of, generator_of_jobs, sweep_jobs
from rlhf.words import catalogue
from rlhf.words.compose import initialized
from rlhf.words.mistakes import explained, listed, readable


def sweep(*overrides: str | Sequence[str], config_dir: str | Path | None = None) -> list[Experiment]:
    """Run every combination of the swept overrides, and return the runs in the order of the jobs.

    Finished runs are not repeated. The launcher is Hydra's: `hydra/launcher=joblib` runs jobs in local
    processes, `hydra/launcher=slurm` submits them.

    Args:
        overrides: overrides as on the command line, such as "algo=dpo,ppo", "seed=1,2,3"; also in lists.
        config_dir: a folder laid out like conf/ with further options, as `--config-dir`.

    Raises:
        UserError: the config of a job is invalid; nothing is started.
        RunError: a job failed; the results of the other jobs are kept, and the same call runs only the jobs
            without a result.
        KeyboardInterrupt: Ctrl-C; the same call resumes the sweep.
    """
    typed = listed(overrides)
    words = readable(typed)
    with catalogue.also(config_dir):
        runs = jobs(words)
    if found := [f"{run.folder.name}: {problem}" for run in runs for problem in run.problems()]:
        raise UserError(*dict.fromkeys(found))
    folder = [] if config_dir is None else ["--config-dir", str(config_dir)]
    code = _follow([sys.executable, "-m", "rlhf.train", "-m", *typed, *folder])
    if code:
        failed = [str(run.folder) for run in runs if run.status != "finished"]
        raise RunError(
            f"the sweep ended with exit code {code}; the output above has the reason. Not finished: "
            f"{', '.join(failed) or 'none'}"
        )
    return runs


def jobs(overrides: Sequence[str]) -> list[Experiment]:
    """Return the runs of the sweep `python -m rlhf.train -m <overrides>`.

    Raises:
        UserError: an override is invalid, or the sweeper chooses values during the sweep.
    """
    with explained(overrides, sweep=True), initialized() as search:
        config = multirun_config([*search, *overrides])
        if not uses_basic_sweeper(config):
            raise UserError(
                "hydra/sweeper must be basic in Python (a search chooses its runs while it goes on), got "
                f"{config.hydra.sweeper._target_}; run: python -m rlhf.train -m {shlex.join(overrides)}"
            )
        jobs = sweep_jobs(config)
        with selecting(generator_of_jobs(config, jobs)):
            return [experiment_of(config, job, number) for number, job in enumerate(jobs, 1)]


def _follow(command: list[str]) -> int:
    """Run a command, print its output line by line, and return its exit code.

    Raises:
        KeyboardInterrupt: after Ctrl-C, when the command has ended.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)  # a notebook does not send Ctrl-C to the child
            child.wait()
            raise
        return child.wait()
