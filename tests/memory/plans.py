"""Models, machines and a short form of memory plans, for the tests of this folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rlhf.core.machine import Machine
from rlhf.memory.plan import plan
from rlhf.memory.uses import GIB
from rlhf.words.compose import compose
from tests.model_folders import write_model

LAPTOP = Machine(ram=16 * GIB)
TWO_GPUS = Machine(ram=256 * GIB, gpus=(80 * GIB, 40 * GIB))
PYTHIA_2_8B = {
    "model_type": "gpt_neox",
    "vocab_size": 50304,
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 10240,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
COUNT_2_8B = 2_775_208_960  # parameters, as EleutherAI publish them


def gpus(count: int, each: float = 80) -> Machine:
    """Return a machine with 256 GiB of RAM and GPUs of `each` GiB."""
    return Machine(ram=256 * GIB, gpus=(int(each * GIB),) * count)


def local_model(folder: Path, config: dict) -> str:
    """Write a model folder whose weights have no tensors, so that its size follows from its config."""
    return write_model(folder, config, tensors={})


def needs(
    words: str | Sequence[str], machine: Machine = LAPTOP, trains: bool = True
) -> dict[str, dict[str, float]]:
    """Return the plan as bytes, by device and then by part.

    A part of a phase has a name such as "training / gradients", and the phase one such as "training". Parts
    with the same name are summed.
    """
    cfg = compose(words.split() if isinstance(words, str) else words)
    found: dict[str, dict[str, float]] = {}
    for use in plan(cfg, machine, trains=trains).uses:
        sizes: dict[str, float] = defaultdict(float)
        for part in use.parts:
            sizes[part.name] += part.bytes
        for phase in use.phases:
            sizes[phase.name] = phase.bytes
            for part in phase.parts:
                sizes[f"{phase.name} / {part.name}"] += part.bytes
        found[use.device] = dict(sizes)
    return found
