"""The command: `python -m rlhf.train [group=option ...] [key=value ...]`; `--help` says what there is.

    compose (Hydra) -> check (rlhf.preflight, before a folder is made) -> run (rlhf.run, where torch comes in)

Exit codes: 0 done, or done already; 1 a defect, with its traceback, or a run that had to stop, as
`error: ...`; 2 the user's to mend, as `error: ...`; 75 (EX_TEMPFAIL) interrupted by SIGTERM, SIGUSR1 or
SIGUSR2, and the same command goes on; 130 interrupted by Ctrl-C; 143 ended at once by a second SIGTERM. A
sweep goes on when a job fails, and ends with 1 or 2.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlhf.checks.check import refuse, typed, words
from rlhf.checks.machine import check_machine
from rlhf.config import catalogue as options
from rlhf.config import plugins
from rlhf.config.identity import run_name
from rlhf.config.mistakes import CONFIG_ERRORS, explain
from rlhf.core.errors import Interrupted, RunError, UserError
from rlhf.launch import slurm
from rlhf.launch.command_line import exit_codes, stop
from rlhf.launch.jobs import announce
from rlhf.launch.sweep import Sweep
from rlhf.processes import signals
from rlhf.runs.folder import RunFolder
from rlhf.runs.resuming import prepare

OmegaConf.register_new_resolver("run_name", lambda *, _root_: run_name(_root_), replace=True)


OmegaConf.register_new_resolver("rlhf_options", options.options_help, replace=True)


OmegaConf.register_new_resolver("rlhf_keys", options.keys_help, replace=True)


CONF = options.conf_dir()


composed = False  # whether a job has started: from then on an exception is no longer about the config


def run_job(config: DictConfig) -> float | None:
    """Run one job, in this process or in one that a launcher started; returns what a sweeper optimises."""
    global composed
    composed = True
    slurm.name_rank()
    job = HydraConfig.get()
    overrides = words(job.overrides)
    sweep = job.mode == RunMode.MULTIRUN
    folder = RunFolder(Path(job.runtime.output_dir))
    try:
        cfg = typed(config, overrides)
        if sweep:
            print(f"job {job.job.num}: {' '.join(overrides)}")
            if (finished := prepare(folder, cfg)) is not None:
                announce(folder, finished, cfg.metric)
                return finished["result"].get(cfg.metric)
            check_machine(cfg)
        from rlhf.stages.run import run

        return run(cfg, folder)
    except Interrupted as reason:
        if signals.active is not None:  # of the command
            raise
        slurm.requeue(reason)
        raise RunError(str(reason)) from None
    except (UserError, RunError) as error:
        if sweep:  # the other jobs go on; the sweep tells it at its end
            raise
        stop(error)
    except Exception:
        if sweep:  # it may come back from another process, without its traceback
            traceback.print_exc()
        raise


train = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run_job)


def main() -> None:
    """Run the command line."""
    global composed
    composed = False
    slurm.name_rank()
    # What the launcher of DeepSpeed adds; the environment says it too.
    sys.argv[1:] = [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises what it would print in the words of its makers
    # Hydra lists its groups for every --help, a second's work, though our template has its own list.
    if "--hydra-help" not in sys.argv:
        Hydra.format_config_groups = lambda *_, **__: ""  # type: ignore[method-assign]
    sweep = Sweep()
    try:
        with exit_codes():
            plugins.load()
            with sweep.watching():
                try:
                    train()
                except (Interrupted, KeyboardInterrupt):
                    sweep.tell()
                    raise
                except Exception as error:  # a sweeper may stop where jobs fail
                    if not sweep.knows(error):
                        raise
            sweep.end()
    except CONFIG_ERRORS as error:
        if composed:
            raise
        refuse([explain(error, [word for word in sys.argv[1:] if not word.startswith("-")])])


if __name__ == "__main__":
    # Under its own name, so that a job that is sent to another process finds there what it is made of.
    pass

    main()
