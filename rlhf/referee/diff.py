"""The differences of two bundles, or of a bundle and its replay, in the order of the computation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.core.batch import Batch
from rlhf.core.errors import UserError, explained
from rlhf.referee.bundle import bundle, updates_of
from rlhf.referee.file import BatchFile
from rlhf.referee.replay import malformed
from rlhf.runs.folder import RunFolder
from rlhf.terminal.console import console, show

NAMES = {
    "index": "prompts",
    "prompt_ids": "prompt tokens",
    "response_ids": "tokens",
    "response_mask": "mask",
    "behaviour_logprobs": "log-probs of the sampler",
    "scores": "rewards",
    "ref_logprobs": "log-probs of the reference",
    "old_logprobs": "log-probs before the update",
}
LOGPROBS, GRADIENTS = 1e-5, 1e-4  # bounds of rounding in float32: absolute; relative to the largest value
HALF = 1e3  # factor of these bounds with 16 bits
SHOWN = 8  # names of quantities after the first one


@dataclass(frozen=True)
class Difference:
    """A quantity that differs."""

    name: str
    text: str  # how many values, where, and by how much
    rounding: bool  # whether the rounding of another machine explains it


def quantities(file: BatchFile) -> Iterator[tuple[str, Any]]:
    """Yield the quantities of a bundle by name, in the order of the computation."""
    yield "weights before the update", file.header.get("before")
    names = [each.name for each in fields(Batch)]
    for stage in ("batch", "credited"):
        found = [name.partition("/")[2] for name in file.tensors if name.startswith(f"{stage}/")]
        known = [name for name in found if name.partition("/")[0] in names]
        for name in sorted(known, key=lambda name: (names.index(name.partition("/")[0]), name)):
            shown = NAMES.get(name, name)
            again = stage == "credited" and f"batch/{name}" in file.tensors
            yield f"{shown} of the trained responses" if again else shown, file.tensors[f"{stage}/{name}"]
    for at, metrics in enumerate(file.header["steps"], 1):
        own = [name for name in file.tensors if name.startswith(f"step{at}/")]
        for name in sorted(own, key=lambda name: (name.endswith("_grads"), not name.endswith("rows"), name)):
            yield f"step {at}: {name.partition('/')[2]}", file.tensors[name]
        for name in sorted(
            metrics, key=lambda name: (not name.startswith("loss/"), "grad_norm" not in name, name)
        ):
            yield f"step {at}: {name}", metrics[name]
    yield "weights after the update", file.header.get("after")


def differences(
    a: BatchFile, b: BatchFile, prompt: int | None = None, whole: bool = True
) -> list[Difference]:
    """Return the quantities that differ, the first one first.

    Args:
        a, b: the bundles.
        prompt: the row of the only prompt that is compared; None: all.
        whole: whether a quantity that only one of them has is a difference; a replay computes only a part.
    """
    found: list[Difference] = []
    with explained(malformed):
        both = zip_longest(a.header["steps"], b.header["steps"], fillvalue=dict[str, Any]())
        steps = [{**one, **other} for one, other in both]
        order = quantities(BatchFile({**a.tensors, **b.tensors}, {**a.header, "steps": steps}))
        mine, others = dict(quantities(a)), dict(quantities(b))
        half = any(f"dtype: {kind}" in a.header["config"] for kind in ("bfloat16", "float16"))
        for name, _ in order:
            x: Any = mine.get(name)
            y: Any = others.get(name)
            if x is None or y is None:
                found += [
                    Difference(name, f"only in the {'first' if y is None else 'second'}", False)
                ] * whole
                continue
            if prompt is not None and isinstance(x, Tensor) and not name.endswith("rows"):
                x, y = (each[prompt : prompt + 1] if len(each) > 1 else each for each in (x, y))
            found += compared(name, x, y, HALF if half else 1.0)
    return found


def compared(name: str, x: Any, y: Any, wide: float) -> Iterator[Difference]:
    """Yield the difference of two tensors, numbers or digests, if there is one; two NaN are equal."""
    if not isinstance(x, Tensor):
        if x != y and not (x != x and y != y):
            near = isinstance(x, str) or math.isclose(x, y, rel_tol=GRADIENTS * wide, abs_tol=1e-6 * wide)
            yield Difference(name, f"{x} and {y}", near)
        return
    if x.shape != y.shape or x.dtype != y.dtype:
        yield Difference(name, f"{x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}", False)
        return
    x, y = x.double(), y.double()
    differ = (x != y) & ~(x.isnan() & y.isnan())
    if differ.any():
        place = differ.nonzero()[0].tolist()
        names = ("prompt", "sample", "position", "candidate")
        where = ", ".join(f"{dim} {i + 1}" for dim, i in zip(names, place, strict=False))
        size = float((x - y).abs().nan_to_num(torch.inf).max())
        bound = GRADIENTS * float(x.abs().max()) if name.endswith("_grads") else LOGPROBS
        text = f"{int(differ.sum())} of {x.numel()} values, the first at {where}, by at most {size:.3g}"
        yield Difference(name, text, size <= wide * bound)


def report(found: Sequence[Difference], elsewhere: bool, as_json: bool) -> int:
    """Print whether two bundles are the same, and the first difference; return the exit code, 0 or 1.

    Args:
        found: the differences.
        elsewhere: whether machine, libraries or numbers of threads differ, so that rounding may differ.
        as_json: print a list of all differences.
    """
    within = elsewhere and all(each.rounding for each in found)
    if as_json:
        state = "rounding" if within else "differs"
        console.print_json(data=[{"term": each.name, "state": state, "text": each.text} for each in found])
        return int(bool(found) and not within)
    if not found:
        show("same bits")
        return 0
    show(f"first difference: {found[0].name}: {found[0].text}")
    if others := [each.name for each in found[1:]]:
        more = f", and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        show(f"then: {', '.join(others[:SHOWN])}{more}")
    if within:
        show("same within rounding (the machines, libraries or numbers of threads differ)")
    return int(not within)


def bundles_of(runs: Sequence[RunFolder], folder: Path) -> tuple[int | None, list[Path]]:
    """Bundle the first update at which two runs differ, without weights.

    Returns:
        The number of the update (None: no row of metrics differs), and the bundles of both runs in `folder`.

    Raises:
        UserError: the runs have no update in common.
    """
    a, b = map(updates_of, runs)
    if not (both := sorted(a.keys() & b.keys())):
        raise UserError(f"{runs[0].path} and {runs[1].path} must have rows of the same updates, got none")
    first = next((update for update in both if a[update] != b[update]), None)
    if first is None:
        return None, []
    files = [folder / f"{name}.safetensors" for name in "ab"]
    for run, file in zip(runs, files, strict=True):
        bundle(run, first, file, weights=False)
    return first, files
