"""Catalogue of the config groups, options and keys, as `--help` lists them. This module imports no torch."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

ORDER = (
    *("algo", "model", "task", "generator", "backend", "scorer", "logger"),
    *("hardware", "experiment", "sweep", "debug"),
)
NOT_LISTED = ("tuned", "hydra")  # folders of conf/ that --help does not list

KEYS = {  # key -> description, for the list of keys in --help
    "algo.beta": "dpo: beta of the loss; a higher value keeps the policy closer to the reference",
    "algo.samples_per_prompt": "K, responses per prompt",
    "schedule.total_episodes": "responses in the whole run (supervised: schedule.total_epochs)",
    "schedule.prompts_per_update": "N, prompts per rollout batch",
    "schedule.minibatches": "optimizer steps per pass over a rollout batch",
    "schedule.epochs": "passes over a rollout batch",
    "schedule.max_lag": "0: synchronous; n: up to n later batches are sampled during training",
    "schedule.update": "between: weights change between requests; in_flight: during requests",
    "schedule.eval_every": "updates; below 1: fraction of the run (also save_every, log_every)",
    "generator.response_length": "maximum response length in tokens (see also generator.temperature)",
    "generator.replicas": "generator processes, used in turn; useful up to schedule.max_lag + 1",
    "generator.threads": "CPU threads of the generator process (backend.threads: of the trainer)",
    "optim.lr": "learning rate (see also optim.schedule, warmup, max_grad_norm, weight_decay)",
    "backend.micro_batch": "sequences per forward pass",
    "model.policy": "hub name or folder (also model.base, reference, reward, tokenizer)",
    "scorer@gold": "judge of eval/win_rate: one of the options of scorer",
    "seed": "seed of all random numbers of the run",
    "resume": "auto, never (start again) or must (fail without a checkpoint)",
    "output_dir": "folder of the run folders",
}


def conf_dir() -> Path:
    """Return the folder conf/: beside the package in a checkout, inside the package in a wheel."""
    package = Path(__file__).resolve().parent.parent
    inside, beside = package / "conf", package.parent / "conf"
    return inside if inside.is_dir() else beside


def conf_dirs() -> list[Path]:
    """Return the folder conf/ and each folder that the command line adds with `--config-dir`."""
    found = [conf_dir()]
    for argument, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        if argument in ("--config-dir", "-cd"):
            found.append(Path(following))
        elif argument.startswith("--config-dir="):
            found.append(Path(argument.partition("=")[2]))
    return found


def groups() -> list[str]:
    """Return the config groups that `--help` lists."""
    found = {
        path.name
        for folder in conf_dirs()
        if folder.is_dir()
        for path in folder.iterdir()
        if path.is_dir() and path.name not in NOT_LISTED and any(path.glob("*.yaml"))
    }
    return sorted(found, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def options(group: str) -> dict[str, str]:
    """Return the options of a group with their descriptions (the first comment line of each file)."""
    files = {path.stem: path for folder in conf_dirs() for path in sorted((folder / group).glob("*.yaml"))}
    return {name: first_comment(path) for name, path in files.items()}


def first_comment(file: Path) -> str:
    """Return the first comment line of a YAML file that is no package directive; "" if there is none."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ").strip()
    return ""


def all_keys() -> list[str]:
    """Return the dotted keys of all sections and options."""
    from rlhf.config.root import Config
    from rlhf.config.schema import SCHEMAS

    keys = []
    for name, hint in get_type_hints(Config).items():
        if is_dataclass(hint):
            keys += [f"{name}.{inner.name}" for inner in fields(hint) if inner.name != "name"]
        else:
            keys.append(name)
    for name, cls in SCHEMAS.items():
        keys += [f"{name.split('/')[1]}.{inner.name}" for inner in fields(cls) if inner.name != "name"]
    return list(dict.fromkeys(keys))


def options_help() -> str:
    """Return the groups and their options as `--help` shows them."""
    blocks = []
    for group in groups():
        blocks.append(f"  {group}")
        blocks += table(options(group).items(), indent=4, width=24)
    return "\n".join(blocks)


def keys_help() -> str:
    """Return the keys as `--help` shows them."""
    return "\n".join(table(KEYS.items(), indent=2, width=30))


def table(rows: Iterable[tuple[str, str]], indent: int, width: int) -> list[str]:
    """Return the lines of a table of two columns; the second column is wrapped.

    Args:
        rows: the cells.
        indent: spaces before the first column.
        width: width of the first column.
    """
    lines = []
    for left, right in rows:
        first = f"{'':{indent}}{left:{width}}"
        rest = " " * len(first)
        lines += textwrap.wrap(right, 110, initial_indent=first, subsequent_indent=rest) or [first.rstrip()]
    return [line.replace("$", "$$") for line in lines]  # Hydra reads the help text as a string.Template
