"""What a person can choose: the groups and options of conf/, one line each for --help. Imports no torch."""

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


NOT_FOR_PEOPLE = ("tuned", "hydra")


KEYS = {  # the keys that --help shows
    "algo.beta": "dpo: strength of the pull to the reference",
    "algo.samples_per_prompt": "K, responses of one prompt",
    "schedule.total_episodes": "responses of the whole run (supervised: schedule.total_epochs)",
    "schedule.prompts_per_update": "N, prompts of one rollout batch",
    "schedule.minibatches": "optimizer steps in a pass over a rollout batch",
    "schedule.epochs": "passes over a rollout batch",
    "schedule.max_lag": "0 synchronous; n: up to n later batches in flight",
    "schedule.update": "between requests, or in_flight: weights change while they run",
    "schedule.eval_every": "updates; below 1: fraction of the run; likewise save_every, log_every",
    "generator.response_length": "tokens; likewise generator.temperature",
    "generator.replicas": "processes that take requests in turn, useful up to schedule.max_lag + 1",
    "generator.threads": "CPU threads of the generator's process; likewise backend.threads of the trainer",
    "optim.lr": "likewise optim.schedule, warmup, max_grad_norm, weight_decay",
    "backend.micro_batch": "sequences a forward",
    "model.policy": "hub name or folder; likewise model.base, reference, reward, tokenizer",
    "scorer@gold": "the judge of eval/win_rate, one of the scorers",
    "seed": "of everything that is random in the run",
    "resume": "auto, never, must",
    "output_dir": "where run folders are made",
}


def conf_dir() -> Path:
    """Folder of the options: beside the package in a checkout, inside it when installed from a wheel."""
    package = Path(__file__).resolve().parent.parent
    inside, beside = package / "conf", package.parent / "conf"
    return inside if inside.is_dir() else beside


def conf_dirs() -> list[Path]:
    """The same, then the folder that the command line adds with --config-dir."""
    found = [conf_dir()]
    for word, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        if word in ("--config-dir", "-cd"):
            found.append(Path(following))
        elif word.startswith("--config-dir="):
            found.append(Path(word.partition("=")[2]))
    return found


def groups() -> list[str]:
    """Groups that a person chooses from."""
    found = {
        path.name
        for folder in conf_dirs()
        if folder.is_dir()
        for path in folder.iterdir()
        if path.is_dir() and path.name not in NOT_FOR_PEOPLE and any(path.glob("*.yaml"))
    }
    return sorted(found, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def options(group: str) -> dict[str, str]:
    """Options of a group, and what each is: the first comment of its file."""
    files = {path.stem: path for folder in conf_dirs() for path in sorted((folder / group).glob("*.yaml"))}
    return {name: first_comment(path) for name, path in files.items()}


def first_comment(file: Path) -> str:
    """First line of a YAML file that is a comment and no package directive."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ").strip()
    return ""


def all_keys() -> list[str]:
    """Every key of every section and option, dotted."""
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
    """The groups and their options, as --help shows them."""
    blocks = []
    for group in groups():
        blocks.append(f"  {group}")
        blocks += table(options(group).items(), indent=4, width=24)
    return "\n".join(blocks)


def keys_help() -> str:
    """The keys that are set most, as --help shows them."""
    return "\n".join(table(KEYS.items(), indent=2, width=30))


def table(rows: Iterable[tuple[str, str]], indent: int, width: int) -> list[str]:
    """Two columns, the second wrapped."""
    lines = []
    for left, right in rows:
        first = f"{'':{indent}}{left:{width}}"
        rest = " " * len(first)
        lines += textwrap.wrap(right, 110, initial_indent=first, subsequent_indent=rest) or [first.rstrip()]
    return [line.replace("$", "$$") for line in lines]  # Hydra fills the help text in as a string.Template
