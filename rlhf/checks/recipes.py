"""A recipe must be used with its command: some recipes train nothing, so `rlhf.train` refuses them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rlhf.config.catalogue import conf_dirs
from rlhf.config.mistakes import split

COMMAND = re.compile(r"^# Command:\s*(python -m rlhf\.(\w+) .*)$", re.M)  # in the head of a recipe


def recipes_of_other_commands(overrides: Sequence[str]) -> Iterator[str]:
    """Yield an error for each `experiment=` of the overrides whose recipe is for `rlhf.relabel`."""
    for key, value in map(split, overrides):
        if key.lstrip("+") != "experiment":
            continue
        for folder in conf_dirs():
            file = folder / "experiment" / f"{value}.yaml"
            found = COMMAND.search(file.read_text(encoding="utf-8")) if file.is_file() else None
            if found is not None and found[2] == "relabel":
                yield (
                    f"experiment must be a recipe that trains ({value} only labels pairs), got {value}; "
                    f"run: {found[1]}"
                )
