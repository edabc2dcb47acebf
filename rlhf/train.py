"""The command: `python -m rlhf.train [group=option ...] [key=value ...]`; `--help` says what there is.

    compose (Hydra) -> check (rlhf.preflight, before a folder is made) -> run (rlhf.run, where torch comes in)

Exit codes: 0 done, or done already; 1 a defect, with its traceback; 2 the user's to mend, as `error: ...`;
130 interrupted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlhf import options
from rlhf.errors import RunError, UserError, report
from rlhf.explain import CONFIG_ERRORS, explain
from rlhf.folder import RunFolder, is_first_rank, prepare, run_name
from rlhf.preflight import announce, refuse, typed, words

OmegaConf.register_new_resolver("run_name", lambda *, _root_: run_name(_root_), replace=True)
OmegaConf.register_new_resolver("rlhf_options", options.options_help, replace=True)
OmegaConf.register_new_resolver("rlhf_keys", options.keys_help, replace=True)

CONF = options.conf_dir()

composed = False  # whether a job has started: from then on an exception is no longer about the config


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def train(config: DictConfig) -> float | None:
    """Run one job; returns what a sweeper optimises."""
    global composed
    composed = True
    job = HydraConfig.get()
    overrides = words(job.overrides)
    sweep = job.mode == RunMode.MULTIRUN
    folder = RunFolder(Path(job.runtime.output_dir))
    try:
        cfg = typed(config, overrides)
        if sweep:
            print(f"job {job.job.num}: {' '.join(overrides)}")
            if (finished := prepare(folder, cfg.resume)) is not None:
                announce(folder, finished, cfg.metric)
                return finished["result"].get(cfg.metric)
        from rlhf.run import run

        return run(cfg, folder)
    except (UserError, RunError) as error:
        if sweep:  # the other jobs go on; Hydra raises this one at the end
            raise
        if isinstance(error, RunError):
            stop(error)
        refuse(error.problems)


def main() -> None:
    """Run the command line."""
    global composed
    composed = False
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises what it would print in the words of its makers
    # Hydra lists its groups for every --help, a second's work, though our template has its own list.
    if "--hydra-help" not in sys.argv:
        Hydra.format_config_groups = lambda *_, **__: ""  # type: ignore[method-assign]
    try:
        train()
    except UserError as error:
        refuse(error.problems)
    except RunError as error:
        stop(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except CONFIG_ERRORS as error:
        if composed:
            raise
        refuse([explain(error, [word for word in sys.argv[1:] if not word.startswith("-")])])


def stop(error: RunError) -> NoReturn:
    """End the command where a run had to stop."""
    if is_first_rank():
        print(report([str(error)]), file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
