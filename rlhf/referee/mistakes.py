"""The table of mistakes: its rows as changes of a file and a recipe.

mistakes.yaml has special mistakes as rows, and families that this module writes out: each setting with each
other value, coefficients, tensors and masks that are moved or exchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations, permutations, product
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from rlhf.core.errors import UserError
from rlhf.core.metrics import selected
from rlhf.referee.file import BatchFile
from rlhf.referee.recipe import SETTINGS, TABLE, Recipe

Row = tuple[str, str, dict[str, Any]]  # term, words, what changes
_VIRTUAL = ("kl_mask", "whiten_mask", "count_mask", "ratio_mask", "trainer_logprobs", "sampler_logprobs")
_TERMS = {**{key: row[1] for key, row in SETTINGS.items()}, **TABLE["tensors"]}


def own_rows(path: Path) -> dict[str, list[Row]]:
    """Return the rows of mistakes of a file of the user, by stage.

    Raises:
        UserError: the file cannot be read, or a row is no row; it names all problems.
    """
    try:
        stages = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--mistakes must be a YAML file, got {' '.join(str(error).split())}") from None
    problems = []
    for stage, given in stages.items() if isinstance(stages, dict) else [("the file", stages)]:
        for row in (
            given if stage in [*TABLE["stages"]] and isinstance(given, list) else [f"{stage}: {given}"]
        ):
            match row:
                case [str(), str(), dict() as change] if {str(key).split(".")[0] for key in change} <= {
                    *_TERMS
                }:
                    continue
            rule = f"{{{', '.join(TABLE['stages'])}: [[term, words, {{setting or tensor: value}}], ...]}}"
            problems.append(f"{path} must have rows as {rule}, got {row!r:.80}")
    if problems:
        raise UserError(*problems)
    return dict(stages)


def rows(stage: str, recipe: Recipe) -> Iterator[Row]:
    """Yield the rows of a stage: special ones, then those of the families."""
    table = TABLE["stages"][stage]
    yield from table["rows"]
    yield from varied(stage, recipe)
    for family in ("factors", "moves", "masks"):
        for name, (form, words) in product(table[family], TABLE[family]):
            yield _TERMS[name], f"{name} {words}", {name: form and form.format(name)}
    for names in table["exchanged"]:
        for a, b in permutations(names, 2):
            yield _TERMS[a], f"{b} in place of {a}", {a: f"${b}"}
        for a, b in combinations(names, 2):
            yield _TERMS[a], f"{a} and {b} are exchanged", {a: f"${b}", b: f"${a}"}


def varied(stage: str, recipe: Recipe) -> list[Row]:
    """Return the rows with other values of settings; rows that change fewer settings come first."""
    found: list[Row] = []
    for keys in TABLE["stages"][stage]["settings"]:
        for values in product(*(SETTINGS[key][2] for key in keys)):
            change = {k: v for k, v in zip(keys, values, strict=True) if v != getattr(recipe, k)}
            texts = [f"{k} is {v}, not {getattr(recipe, k)}: {SETTINGS[k][2][v]}" for k, v in change.items()]
            if change and values[0] not in ("given", "gae"):
                found.append((_TERMS[next(iter(change))], "; ".join(texts).rstrip(": "), change))
    return sorted(found, key=lambda row: len(row[2]))


def twisted(file: BatchFile, recipe: Recipe, change: dict[str, Any]) -> tuple[BatchFile, Recipe] | None:
    """Return file and recipe after the change of a row; None if the file lacks a tensor of the row."""
    tensors: dict[str, Tensor | None] = {}
    settings: dict[str, Any] = {}
    for name, given in change.items():
        value = given
        if isinstance(given, str) and (match := re.fullmatch(r"(?:([-\d.]+)\*)?\$([\w.]+) ?(\S*)", given)):
            factor, source, move = match.groups()
            own = file.get(source, file.mask if source.endswith("_mask") else None)
            value = getattr(recipe, source, recipe.correction.get(source.removeprefix("correction."), own))
            if isinstance(value, Tensor):
                value = moved(file, value, move)
            if value is None:
                return None
            value = value if factor is None else float(factor) * value
        if name.startswith("correction.") and recipe.correction:
            options = settings.get("correction", recipe.correction)
            settings["correction"] = {**options, name.removeprefix("correction."): value}
        elif hasattr(recipe, name):
            settings[name] = value
        elif name in file or name in _VIRTUAL:
            tensors[name] = value
        else:
            return None
    return file.changed(**tensors), recipe.changed(**settings)


def moved(file: BatchFile, x: Tensor, move: str) -> Any:
    """Return a tensor after a move; None if the tensor has not the dimensions."""
    rows, micro = len(x), file["micro_batch"]
    moves = {
        "": lambda: x,
        "vv": lambda: x.roll(1, 0),
        "^^": lambda: x.roll(-1, 0),
        "flipped": lambda: x.flip(0),
        "interleaved": lambda: torch.arange(rows) % len(x.unique()),
        "neighbours": lambda: torch.arange(rows) // max(1, rows // len(x.unique())),
        "by_micro_batch": lambda: x * len(micro) + micro if len(micro) == rows else None,
        "squared": lambda: x.square(),
        "inverted": lambda: 1 / x.clamp(min=1e-6),
    }
    if move in moves:
        return moves[move]()
    if x.dim() < 2:
        return None
    if move[:2] in (">>", "<<"):
        by, edge = (1, 0) if move[0] == ">" else (-1, -1)
        rolled = x.roll(by, 1)
        if move[2:]:
            rolled[:, edge] = x[:, edge] if move[2:] == "=" else 0
        return rolled
    mask = x if x.dtype == torch.bool else file.mask if x.shape == file.mask.shape else torch.ones_like(x) > 0
    counts = mask.sum(1, keepdim=True)
    if move == "left":
        return x.gather(1, (torch.arange(x.shape[1]) - (x.shape[1] - counts)) % x.shape[1])
    if move == "mean":
        return (selected(x, mask).sum(1, keepdim=True) / counts.clamp(min=1)).expand(x.shape)
    after, before = moved(file, mask, ">>0"), moved(file, mask, "<<0")
    masks = {
        "longest": counts.max().item(),
        "all": mask.any(-1, keepdim=True).expand(mask.shape),
        "after": mask | after,
        "before": mask | before,
        "without_last": mask & before,
        "without_first": mask & after,
        "messages": mask | file.get("environment_mask", mask),
    }
    return masks.get(move)
