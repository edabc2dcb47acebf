"""Memory of the optimizer: the state per parameter, and temporary tensors of a step on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.schedule import Optimizer
from rlhf.memory.model_size import adapter_parameters, linear_shapes, matrix_parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf.config.footprint import Footprint
    from rlhf.config.root import Config
    from rlhf.memory.loaded_models import Model

_BLOCK = 256  # elements of a moment that have a common float32 scale
EIGHT_BIT = 2 * (1 + 4 / _BLOCK)  # bytes per parameter of two moments of 8 bits
_MOMENTUM = 4  # bytes per parameter of Muon's state
_ITERATION = 10  # bytes per element of a matrix during Muon's step: a float32 update, three bfloat16 copies


def with_state(footprint: Footprint, cfg: Config, model: Model) -> Footprint:
    """Return the footprint of a model with the bytes of optimizer state per trained parameter.

    Args:
        footprint: footprint of the backend, with AdamW.
        cfg: the config of the run.
        model: the model.
    """
    if cfg.optim.optimizer is Optimizer.adamw_8bit:
        return replace(footprint, optimizer=EIGHT_BIT)
    if cfg.optim.optimizer is Optimizer.muon and model.trainable:
        share = _matrices(cfg, model) / model.trainable
        return replace(footprint, optimizer=_MOMENTUM * share + footprint.optimizer * (1 - share))
    return footprint


def _matrices(cfg: Config, model: Model) -> int:
    """Return the number of parameters of a model that Muon updates."""
    if not model.trained:
        return 0
    if model.adapters is None:
        return min(matrix_parameters(model.counted), model.trainable)
    return adapter_parameters(model.counted, cfg.model.lora.rank, cfg.model.lora.targets)


def temporary(footprint: Footprint, cfg: Config, models: Sequence[Model]) -> float:
    """Return the bytes on one GPU of temporary tensors of a step, without division over ranks.

    Muon updates one matrix after the other. The kernel of AdamW with 8-bit moments has no such tensors.
    """
    count = sum(model.trainable for model in models)
    if cfg.optim.optimizer is Optimizer.adamw_8bit:
        return 0
    if cfg.optim.optimizer is Optimizer.muon:
        count -= sum(_matrices(cfg, model) for model in models)
        trained = [model.counted for model in models if model.trained]
        shapes = [shape for size in trained for shape in linear_shapes(size).values()]
        return footprint.step * count + _ITERATION * max(a * b for a, b in shapes)
    return footprint.step * count
