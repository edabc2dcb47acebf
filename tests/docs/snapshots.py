"""Snapshots of the resolved values of every recipe and sweep: a changed value changes snapshots.yaml.

The file has all values of the default run, and of a recipe the values that differ from the default run.
`make snapshots` (python -m tests.docs.snapshots) writes the file again. Review the differences before you
commit them: a recipe of the paper has the values of the paper and of its published recipes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

import rlhf.words.compose  # noqa: F401  registers the resolver of conf/config.yaml
from rlhf.config.root import Config
from rlhf.words.catalogue import conf_dir, options

FILE = Path(__file__).with_suffix(".yaml")
RECIPES = sorted(options("experiment"))
SEARCHES = {"lr"}  # their values are chosen during the sweep
SWEEPS = sorted(options("sweep").keys() - SEARCHES)


@cache
def compose(*words: str, with_hydra: bool = False) -> DictConfig:
    """Return the composed config of a command line. Calls with the same arguments share one object."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return hydra.compose("config", list(words), return_hydra_config=with_hydra)


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested dictionaries with its dotted key."""
    if isinstance(tree, dict) and tree:
        for name, below in tree.items():
            yield from leaves(below, f"{key}.{name}".lstrip("."))
    else:
        yield key, tree


def objects(*words: str) -> Config:
    """Return the config of a command line as objects of its section classes."""
    made = OmegaConf.to_object(compose(*words))
    assert isinstance(made, Config)
    return made


def resolved(*words: str) -> dict[str, Any]:
    """Return every resolved value of the config of a command line, by its dotted key."""
    plain = OmegaConf.to_container(compose(*words), resolve=True, enum_to_str=True)
    return dict(leaves(plain))


def header(group: str, name: str) -> dict[str, str]:
    """Return the fields in the comments of an option: Paper, Hardware, Time, Metric, Command."""
    text = (conf_dir() / group / f"{name}.yaml").read_text()
    return dict(re.findall(r"^# (\w+): +(.+)$", text, re.M))


RELABELS = [name for name in RECIPES if " -m rlhf.relabel " in header("experiment", name)["Command"]]


def jobs(sweep: str) -> list[list[str]]:
    """Return the overrides of each run of a sweep, with the recipe that the command of the sweep names."""
    words = header("sweep", sweep)["Command"].partition(" -m rlhf.train -m ")[2].split()
    config = compose(*words, with_hydra=True)
    choices = [
        [f"{key}={v}" for v in values.split(",")] for key, values in config.hydra.sweeper.params.items()
    ]
    return [[*words, *chosen] for chosen in itertools.product(*choices)]


def lines(values: dict[str, Any]) -> str:
    """Return the values as YAML, one value per line."""
    return "".join(f"  {key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())


def of_recipe(name: str) -> str:
    """Return the values of a recipe that the default run does not have or that differ from its values."""
    usual, found = resolved(), resolved(f"experiment={name}")
    return lines({key: value for key, value in found.items() if key not in usual or usual[key] != value})


def of_sweep(name: str) -> str:
    """Return the values that differ between the runs of a sweep."""
    runs = [resolved(*words) for words in jobs(name)]
    changes = [key for key in runs[0] if any(run[key] != runs[0][key] for run in runs)]
    return lines({key: [run[key] for run in runs] for key in changes})


SNAPSHOTS: dict[str, Callable[[], str]] = {
    "default": lambda: lines(resolved()),
    **{name: partial(of_recipe, name) for name in RECIPES},
    **{f"sweep_{name}": partial(of_sweep, name) for name in SWEEPS},
}


def kept() -> dict[str, str]:
    """Return the snapshots in the file."""
    return dict(re.findall(r"^(\w+):\n((?:  .*\n)*)", FILE.read_text(), re.M))


def main() -> None:
    """Write all snapshots."""
    FILE.write_text("\n".join(f"{name}:\n{made()}" for name, made in SNAPSHOTS.items()))
    print(f"{len(SNAPSHOTS)} snapshots in {FILE}")


if __name__ == "__main__":
    main()
