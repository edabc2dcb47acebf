"""Whether a server that a run did not start samples what the run trains."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rlhf.core.errors import UserError
from rlhf.generators.servers.launch import way
from rlhf.generators.servers.protocol import NCCL

if TYPE_CHECKING:
    from rlhf.generators.vllm.sampler import VLLMFactory

# Values in the config of a model that do not change its output, or that the flags of the server set
_OTHER = {
    *("_name_or_path", "name_or_path", "transformers_version", "architectures", "auto_map", "use_cache"),
    *("dtype", "torch_dtype", "head_dtype", "bos_token_id", "eos_token_id", "pad_token_id"),
}


def check(settings: VLLMFactory, config: Mapping[str, Any], url: str, about: Mapping[str, Any]) -> None:
    """Check the status of a server.

    Args:
        settings: what the run needs.
        config: the config of the trained model, as a dictionary.
        url: the address of the server.
        about: the status of the server.

    Raises:
        UserError: a setting or the model of the server is another one. The message has the command of a
            server that the run can use.
    """
    head = "float32" if settings.float32_head else settings.dtype
    absent = tuple(about["absent_ids"]), settings.absent_ids
    wrong = [
        *_different(config, about["model"]),
        *_other("dtype", about["dtype"], settings.dtype),
        *_other("head_dtype", about["head_dtype"], head),
        *_other("weights", about["weights"], way(settings)),
        *_other("absent_ids", *(ranges(each) or "none" for each in absent)),
    ]
    if about["max_model_len"] < settings.max_model_len:
        wrong += _other("max_model_len", about["max_model_len"], settings.max_model_len)
    if wrong:
        flags = [settings.model, "--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len)]
        flags += ["--float32-head"] if settings.float32_head else []
        flags += ["--nccl"] if way(settings) == NCCL else []
        flags += ["--absent-ids", ranges(settings.absent_ids)] if settings.absent_ids else []
        raise UserError(
            "generator.urls must name servers of the model and the settings of the run (log-probs would "
            f"differ otherwise), got {url} with {'; '.join(wrong)}; start it with: python -m rlhf.serve "
            f"{shlex.join(flags)}"
        )


def ranges(ids: Sequence[int]) -> str:
    """Return rising numbers as ranges, such as `7,50277-50303`."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def numbers(text: str) -> tuple[int, ...]:
    """Return the rising numbers of ranges such as `7,50277-50303`.

    Raises:
        ValueError: the text has another form.
    """
    parts = [part.partition("-") for part in text.split(",")]
    return tuple(
        sorted(
            {n for first, dash, last in parts for n in range(int(first), int(last if dash else first) + 1)}
        )
    )


def _different(ours: Mapping[str, Any], theirs: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Yield the values that two configs of models do not share; the second one was sent as JSON."""
    ours = json.loads(json.dumps(ours, default=str))
    for name in sorted(ours.keys() & theirs.keys() - _OTHER):
        mine, other = ours[name], theirs[name]
        if isinstance(mine, dict) and isinstance(other, dict):
            yield from _different(mine, other, f"{at}{name}.")
        else:
            yield from _other(f"{at}{name}", other, mine)


def _other(name: str, theirs: Any, ours: Any) -> Iterator[str]:
    if theirs != ours:
        yield f"{name} {theirs} (the run has {ours})"
