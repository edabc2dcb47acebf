"""The batch file: one optimizer step in one safetensors file, with a JSON header (schema 1).

The metadata key `rlhf` holds the header. B: responses of the step, over all ranks and micro-batches; T:
response tokens, padded on the right; P: prompt tokens; A: responses whose rewards were compared; M:
micro-batches; S: states with a value, T or T + 1. Other tensors and keys are kept and ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from rlhf.config.schema import data_file
from rlhf.core.errors import UserError

SCHEMA = 1
_READ: dict[str, Any] = {"mask": lambda x: x != 0, "whole": Tensor.long, "number": Tensor.double}
# key of _READ, then dimensions
_TENSORS = {name: words.split() for name, words in data_file("rlhf.referee", "schema.yaml").items()}
_HEADER: dict[str, Callable[[Any], Any]] = {  # how a value is read; an error of it is a problem of the file
    **dict.fromkeys(("tokens", "grad_norm"), float),
    **{"claims": dict, "updates_since_old": int, "pad_id": int},
    "eos_ids": lambda ids: [int(each) for each in (ids if isinstance(ids, list) else [ids])],
    "grad_norms": lambda norms: {int(count): float(norm) for count, norm in dict(norms).items()},
}


class Missing(LookupError):
    """A tensor that the file does not have, by name."""


@dataclass(frozen=True)
class BatchFile:
    """A batch file in memory: tensors by name (masks as bool, numbers as float64), header, and path."""

    tensors: dict[str, Tensor]
    header: dict[str, Any] = field(default_factory=dict)
    path: Path = Path("batch.safetensors")

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise Missing(name)
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def get(self, name: str, default: Any = None) -> Any:
        """Return a tensor, or the default if the file does not have it."""
        return self.tensors.get(name, default)

    @property
    def mask(self) -> Tensor:
        """The trained tokens [B, T]."""
        return self.tensors["response_mask"]

    @property
    def pairs(self) -> bool:
        """Whether the rows alternate: chosen, rejected."""
        return bool(self.header.get("kind") == "pairs")

    def below(self, folder: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with `folder` and `/`, by the rest of their names."""
        found = ((name.partition("/"), x) for name, x in self.tensors.items())
        return {rest: x for (first, _, rest), x in found if first == folder}

    def changed(self, **tensors: Tensor | None) -> BatchFile:
        """Return the file with other tensors; None removes a tensor."""
        kept = {name: x for name, x in {**self.tensors, **tensors}.items() if x is not None}
        return replace(self, tensors=kept)

    def rows(self, rows: Tensor | slice) -> BatchFile:
        """Return the file with some of its rows; tensors of other dimensions stay."""
        kept = {
            name: x[rows] for name, x in self.tensors.items() if name in _TENSORS and _TENSORS[name][1] == "B"
        }
        return self.changed(**kept)


def write(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Write a batch file."""
    whole = {name: x.detach().cpu().clone().contiguous() for name, x in tensors.items()}
    save_file(whole, path, {"rlhf": json.dumps({"schema": SCHEMA, **header})})


def read(path: Path) -> BatchFile:
    """Read and check a batch file, or read a bundle as it is.

    Raises:
        UserError: the file is neither, has another schema, or lacks or misshapes a tensor.
    """
    try:
        with safe_open(path, "pt") as opened:
            header = json.loads((opened.metadata() or {}).get("rlhf", "null"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise UserError(f"{path} must be a batch file (safetensors), got an error: {error}") from None
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        got = header.get("schema") if isinstance(header, dict) else "no header"
        raise UserError(f"{path} must have schema {SCHEMA} in the metadata key rlhf, got {got}")
    file = BatchFile(tensors, header, path)
    return file if header.get("kind") == "bundle" else checked(file)


def checked(file: BatchFile) -> BatchFile:
    """Return a file with masks as bool, numbers as float64, and the tensors that follow from others.

    Raises:
        UserError: a tensor or a key of the header is missing or malformed; it names all problems.
    """
    header, tensors = {"kind": "policy_gradient", **file.header}, dict(file.tensors)
    if not (problems := [*_malformed(header, tensors)]):
        header |= {key: kind(header[key]) for key, kind in _HEADER.items() if header.get(key) is not None}
        if any(x.dtype.itemsize == 2 for name, x in tensors.items() if name in ("logprobs", "logprob_grads")):
            header["dtype"] = "bfloat16"
        for name in tensors.keys() & {*_TENSORS}:
            tensors[name] = _READ[_TENSORS[name][0]](tensors[name])
        problems = [*_wrong(tensors)]
    if problems:
        raise UserError(*sorted(problems))
    for name in tensors.keys() & {*_TENSORS}:  # NaN at padding would reach gradients
        tensors[name] = tensors[name].nan_to_num(0.0, 0.0, 0.0)
    mask = tensors["response_mask"]
    micro = tensors.get("micro_batch", torch.zeros(len(mask), dtype=torch.int64))
    tensors["micro_batch"] = micro.unique(return_inverse=True)[1]
    if "tokens" in header:
        tensors["tokens"] = torch.tensor(header["tokens"])
    if {"rewards", "group"} <= tensors.keys() and "all_rewards" not in tensors:
        own = {"all_rewards": tensors["rewards"], "all_group": tensors["group"]}
        tensors |= {**own, "all_index": torch.arange(len(mask))}
    if (values := tensors.get("old_values", tensors.get("values"))) is not None:
        states = F.pad(mask, (0, values.shape[1] - mask.shape[1]))
        tensors = {"old_values": values, "value_mask": states, **tensors}
    header["within"] = 1e-4 if header.get("dtype", "float32") == "float32" else 2e-2
    return BatchFile(tensors, header, file.path)


def _malformed(header: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[str]:
    """Yield the problems of a header, and of names, shapes and dtypes of tensors."""
    for key, kind in _HEADER.items():
        try:
            _ = header.get(key) is None or kind(header[key])
        except (TypeError, ValueError) as error:
            yield f"{key} of the header must be as in schema {SCHEMA}, got {header[key]!r}: {error}"
    if header["kind"] not in ("policy_gradient", "pairs"):
        yield f"kind of the header must be policy_gradient or pairs, got {header['kind']!r}"
    for name in {"response_mask", "logprobs"} - tensors.keys():
        yield f"the file must contain {name}, got {', '.join(sorted(tensors)) or 'no tensor'}"
    sizes: dict[str, int] = {}
    for name in (name for name in _TENSORS if name in tensors):
        x = tensors[name]
        dims = _TENSORS[name][1 : 2 if name == "advantages" and x.dim() == 1 else None]
        if x.dim() != len(dims) or not x.numel() or x.is_complex():
            yield f"{name} must be of numbers [{' '.join(dims)}], got {x.dtype} {list(x.shape)}"
            continue
        for dim, size in zip(dims, x.shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                yield f"{name} must have {dim} = {sizes[dim]} as other tensors, got {size}"
    if "S" in sizes and sizes["S"] - sizes.get("T", 0) not in (0, 1):
        yield f"values must have T or T + 1 columns (T = {sizes.get('T')}), got {sizes['S']}"
    if header["kind"] == "pairs" and sizes.get("B", 0) % 2:
        yield f"rows of kind pairs must alternate: chosen, rejected; got {sizes['B']} rows"


def _wrong(tensors: dict[str, Tensor]) -> Iterator[str]:
    """Yield the problems of the numbers of tensors whose shapes are right."""
    mask = tensors["response_mask"]
    for name in tensors.keys() & {*_TENSORS}:
        x = tensors[name]
        used = tensors.get("value_mask", mask) if "S" in _TENSORS[name] else mask
        wrong = ~x.isfinite() & (used if used.shape == x.shape else True)
        if wrong.any():
            place = wrong.nonzero()[0].tolist()
            yield f"{name} must be finite where tokens are trained, got {x[tuple(place)].item()} at {place}"
    index, rewards = tensors.get("all_index"), tensors.get("all_rewards", mask[:0])
    if index is not None and not 0 <= int(index.min()) <= int(index.max()) < len(rewards):
        yield f"all_index must be rows of all_rewards [{len(rewards)}], got {index.min()} to {index.max()}"
    parts = len(tensors.get("micro_batch", mask[:1, 0]).unique())
    for name in ("losses", "value_losses"):
        if "micro_batch" in tensors and len(tensors.get(name, range(parts))) != parts:
            yield f"{name} must have a number for each of {parts} micro-batches, got {len(tensors[name])}"
