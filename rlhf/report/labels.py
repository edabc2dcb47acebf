"""Labels: the settings in which runs differ, as at most three `key=value` pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from rlhf.config.identity import added_later, affecting, not_in_name
from rlhf.config.schema import Affects

Config = Mapping[str, Any]  # a flat config: dotted key -> value

PAIRS = 3  # largest number of pairs of a label
LONGEST_VALUE, LONGEST_LABEL = 28, 60  # characters
_CANDIDATES = 24  # number of keys whose combinations are tried

# Keys that labels and tables prefer; other keys follow in the order of the config.
_FIRST = """
algo.name model.name model.base model.policy algo.loss_type algo.beta algo.kl_coef optim.lr scorer.name
scorer.path generator.name schedule.max_lag schedule.update schedule.replay schedule.solved_at
backend.name schedule.total_episodes schedule.total_epochs schedule.prompts_per_update
algo.samples_per_prompt
"""

_UNCLEAR = ("path", "url", "kind", "level", "weight", "rank")  # ends of keys that need their section


def differing(configs: Sequence[Config]) -> list[str]:
    """Return the keys in which configs differ, in the order of `_FIRST`.

    Runs that differ only in the seed, or in keys that affect nothing, are one group. Keys that affect the
    speed separate groups, and come last. A missing key is equal to its value in `added_later`, or null.
    """
    every = dict.fromkeys(key for config in configs for key in config)
    hidden, last = {"seed", *affecting(Affects.nothing)}, set(not_in_name())
    kept = [key for key in every if key not in hidden and not key.startswith("logger.")]
    found = [key for key in kept if len({identity(config, [key]) for config in configs}) > 1]
    first = {key: place for place, key in enumerate(_FIRST.split())}
    return sorted(found, key=lambda key: (key in last, first.get(key, len(first))))


def identity(config: Config, keys: Iterable[str]) -> str:
    """Return the values of `keys` as one string, for comparison."""
    added = added_later()
    return json.dumps([config.get(key, added.get(key)) for key in keys], default=str)


def labels(configs: Sequence[Config], noun: str = "run") -> list[str]:
    """Return a label for each config; the configs differ from each other.

    A label has up to `PAIRS` pairs `key=value`, as few as distinguish all configs. The first pair is the
    algorithm if the configs differ in the algorithm. If no such labels exist, the labels are numbered:
    "run 1", "run 2", ...

    Args:
        configs: flat configs.
        noun: first part of numbered labels.
    """
    if len(configs) == 1:
        return [pair("algo.name", configs[0]["algo.name"])] if "algo.name" in configs[0] else [noun]
    keys = differing(configs)
    shown = {key: column(configs, key) for key in keys}
    usable = [key for key in keys if all(len(value or "") <= LONGEST_VALUE for value in shown[key])]
    required = [key for key in usable if key == "algo.name"]
    others = [key for key in usable if key not in required][:_CANDIDATES]
    for count in range(PAIRS + 1 - len(required)):
        for added in combinations(others, count):
            chosen = [*required, *added]
            rows = list(zip(*(shown[key] for key in chosen), strict=True))
            if len(set(rows)) == len(configs) and (None,) * len(chosen) not in rows:
                made = [joined(chosen, row) for row in rows]
                if max(map(len, made)) <= LONGEST_LABEL:
                    return made
    return [f"{noun} {place}" for place in range(1, len(configs) + 1)]


def joined(keys: Sequence[str], values: Sequence[str | None]) -> str:
    """Return the pairs of a label; a key without a value is left out."""
    named = zip(headings(keys), values, strict=True)
    return " ".join(f"{name}={value}" for name, value in named if value is not None)


def headings(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key; the whole key if two keys end alike, or in an unclear word."""
    ends = [ending(key) for key in keys]
    whole = [ends.count(end) > 1 or end in _UNCLEAR for end in ends]
    return [key if keep else end for key, end, keep in zip(keys, ends, whole, strict=True)]


def ending(key: str) -> str:
    """Return the last part of a dotted key; for the name of an option, the config group."""
    section, _, name = key.rpartition(".")
    return section.rpartition(".")[2] if name == "name" and section else name


def pair(key: str, value: Any) -> str:
    """Return a setting as `key=value`; folders are left out of a path."""
    return joined([key], short([_shown_value(value)]))


def column(configs: Sequence[Config], key: str) -> list[str | None]:
    """Return the values of `key` as texts; None where a config does not have the key.

    Folders are left out of paths, as long as different values remain different.
    """
    present = [_shown_value(config[key]) for config in configs if key in config]
    names = dict(zip(present, short(present), strict=True))
    return [names[_shown_value(config[key])] if key in config else None for config in configs]


def _shown_value(value: Any) -> str:
    """Return a value as it is written on a command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str).replace('"', "")


def short(values: Sequence[str]) -> list[str]:
    """Return each value without the folders before its last part, or with as few as keep values different."""
    parts = [value.rstrip("/").split("/") for value in values]
    different = len(set(values))
    for count in range(1, max(map(len, parts), default=1) + 1):
        ends = ["/".join(each[-count:]) for each in parts]
        if len(set(ends)) == different:
            return ends
    return list(values)
