"""vLLM's side of the weight transfer: engines of vLLM's weight-transfer interface that record checksums.

vLLM imports this module in each of its workers (`worker_extension_cls`), which registers the engines there.
`rlhf.generators.vllm.sampler.VLLMSampler` calls for every load:

    start_weight_update()
    update_weights(...)                 receive the tensors, record their checksums, load them
    finish_weight_update(version)       from here on vLLM reports this version

The engine for files is defined here; it verifies all tensors before it loads the first tensor. The
engines for CUDA IPC and NCCL are engines of vLLM; a `Witness` in place of the model records the checksum of
each tensor before the model loads the tensor.
"""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.device_allocator import get_mem_allocator_instance
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as RunnerV2Processor

from rlhf.generators.weights import Entry, Manifest, TransferError, checksum, checksums, fingerprint, read
from rlhf.processes.signals import end_with_others

if TYPE_CHECKING:
    from vllm.config import VllmConfig


NAME = "rlhf_{}"  # name of an engine; {} is the value of generator.transfer


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """The initialisation data of the engine, without fields, because every update names its file."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """The data of an update: the file of a version, and its tensors, each as the fields of an `Entry`."""

    path: str
    version: int
    entries: list[list[Any]]


class FileEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """A weight-transfer engine that loads the tensors of a file of the trainer, in memory or in a folder.

    If the verification of a tensor fails, the model is not changed.
    """

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Initialise the engine, without recorded checksums."""
        self.taken: dict[str, int] = {}

    def start_weight_update(self) -> None:
        """Discard the recorded checksums.

        `receive_weights` prepares the layers for loading, after it has verified the tensors.
        """
        self.taken = {}

    def receive_weights(self, update_info: Any) -> None:
        """Verify all tensors, then load them, then compute the checksums of what was loaded.

        Raises:
            TransferError: a tensor differs from what the trainer wrote (then the model is not changed), or a
                parameter of vLLM's model received no tensor.
        """
        entries = tuple(Entry(*each) for each in update_info.entries)
        weights = list(read(Manifest(update_info.version, update_info.path, entries)))
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(iter(weights))
        finalize_layerwise_reload(self.model, self.model_config)
        _check_reached(self.model, loaded)
        self.taken = {name: checksum(tensor) for name, tensor in weights}

    def finish_weight_update(self) -> None:
        """Check that weights were loaded.

        Raises:
            TransferError: no weights were loaded since `start_weight_update`.
        """
        if not self.taken:
            raise TransferError("an update of weights must load tensors before it is finished, got none")

    def shutdown(self) -> None:
        """Do nothing: the engine has no resources between updates."""


class _Witness:
    """A stand-in for the model while an engine receives tensors: it records checksums and loads the tensors.

    Args:
        model: vLLM's model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.sums: dict[str, Tensor] = {}  # fingerprints by tensor name, on the device
        self.reached: set[str] | None = set()  # loaded parameters; None: the model does not report them

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Record the fingerprints of `weights` and load them into the model."""
        weights = list(weights)
        self.sums |= {name: fingerprint(tensor) for name, tensor in weights}
        loaded: set[str] | None = self.model.load_weights(weights)  # type: ignore[operator]
        self.reached = None if loaded is None or self.reached is None else self.reached | loaded


class _Witnessed:
    """A mixin for an engine of vLLM that records checksums (`taken`) and checks that no parameter is skipped.

    The mixin must precede the engine in the bases of a class.
    """

    def start_weight_update(self: Any) -> None:
        """Discard the recorded checksums, then start the engine's update."""
        self.taken: dict[str, int] = {}
        super().start_weight_update()  # type: ignore[misc]

    def receive_weights(self: Any, update_info: Any) -> None:
        """Receive tensors with a `Witness` in place of the model."""
        self.witness = _Witness(self.model)
        self.set_weight_update_target(self.witness, self.model_config)
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            self.reset_weight_update_target()

    def finish_weight_update(self: Any) -> None:
        """Finish the engine's update, check that all parameters were loaded, and record the checksums.

        Raises:
            TransferError: a parameter of vLLM's model received no tensor.
        """
        super().finish_weight_update()  # type: ignore[misc]
        _check_reached(self.model, self.witness.reached)
        self.taken = checksums(self.witness.sums)


class _IpcEngine(_Witnessed, IPCWeightTransferEngine):
    """vLLM's engine for CUDA IPC, with recorded checksums."""


class _NcclEngine(_Witnessed, NCCLWeightTransferEngine):
    """vLLM's engine for NCCL, with recorded checksums."""


def _check_reached(model: torch.nn.Module, reached: set[str] | None) -> None:
    """Check that every parameter of vLLM's model was loaded.

    Args:
        model: vLLM's model.
        reached: names of the loaded parameters; None: unknown, which is accepted.

    Raises:
        TransferError: a parameter was not loaded.
    """
    names = {name for name, _ in model.named_parameters()} if reached is not None else set()
    if untouched := sorted(names - (reached or set())):
        raise TransferError(
            f"weights must reach every parameter of vLLM's model, got none for {', '.join(untouched[:3])} "
            "(vLLM maps the names of this architecture differently)"
        )


for transfer, engine in (
    ("shared_memory", FileEngine),
    ("files", FileEngine),  # of a server
    ("ipc", _IpcEngine),
    ("nccl", _NcclEngine),
):
    WeightTransferEngineFactory.register_engine(NAME.format(transfer), engine)


# Rotary embeddings are computed, and a tied head is the embedding, so neither gets weights at a load.
# `_check_reached` reports parameters without weights
_EXPECTED = re.compile(r"\w*(RotaryEmbedding|ParallelLMHead): Failed to load weights")
logging.getLogger(finalize_layerwise_reload.__module__).addFilter(
    lambda record: not _EXPECTED.fullmatch(record.getMessage())
)


class WorkerExtension:
    """Methods added to vLLM's workers, called through `LLM.collective_rpc`."""

    def answers(self) -> bool:
        """Return that this worker answers."""
        return True

    def taken_checksums(self) -> dict[str, int]:
        """Return the checksums, by name, of the tensors that this worker loaded last."""
        return self.weight_transfer_engine.taken  # type: ignore[attr-defined]

    def unrestored(self) -> list[str]:
        """Return the tensors of the model that are lost if vLLM discards its weights and loads them again.

        After a load, these are the tensors in the memory that vLLM discards that are neither parameters nor
        buffers, each as dtype and shape. Tensors that a load creates are not in this memory. The tensors of
        vLLM's sampler in this memory are written at the start of each request, so they are not lost.
        """
        allocator: Any = get_mem_allocator_instance()
        discarded = [
            range(address, address + allocation.handle[1])
            for address, allocation in allocator.pointer_to_data.items()
            if allocation.tag == "weights"
        ]
        return [
            f"{tensor.dtype} {list(tensor.shape)}"
            for tensor in unregistered(self.model_runner.get_model())  # type: ignore[attr-defined]
            if any(tensor.data_ptr() in addresses for addresses in discarded)
        ]


end_with_others()  # a worker of a server lives on if the main process of its server is killed


# Search for tensors of a model that loading its weights does not restore.


def unregistered(model: torch.nn.Module) -> list[Tensor]:
    """Return the tensors that a model refers to, but that share no memory with a parameter or a buffer.

    The search follows attributes and containers of all objects, except functions, classes and modules of
    Python.
    """
    registered = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    skipped = (type, FunctionType, ModuleType)
    found: dict[int, Any] = {id(model): model}
    todo: list[Any] = [model]
    while todo:
        for each in gc.get_referents(todo.pop()):
            if id(each) not in found and not issubclass(type(each), skipped):
                found[id(each)] = each
                todo.append(each)
    tensors = [each for each in found.values() if type(each) in (Tensor, torch.nn.Parameter)]
    return [x for x in tensors if not x.is_meta and x.untyped_storage().data_ptr() not in registered]


# A logits processor of vLLM that masks the ids that no token has.
#
# vLLM imports this module in its workers. Its log-probs (`processed_logprobs`) are computed after the mask,
# so they equal the log-probs of the trainer, whose head has the same mask
# (`rlhf.models.modules.LogprobHead`).


class AbsentIds(LogitsProcessor, RunnerV2Processor):
    """A logits processor for both model runners of vLLM: 1 on a CPU, 2 by default on a GPU.

    Args:
        vllm_config: the config of vLLM, whose `additional_config` has the masked ids.
        place: the device (runner 1), or an object with the device as attribute (runner 2).
    """

    def __init__(self, vllm_config: VllmConfig, place: Any, *_: Any) -> None:
        device = place if isinstance(place, torch.device) else place.device
        self.ids = torch.tensor(vllm_config.additional_config["absent_ids"], device=device)

    def apply(self, logits: Tensor, *_: Any) -> Tensor:
        """Set the logits [rows, V] of the masked ids to -inf, in place."""
        return logits.index_fill_(-1, self.ids, -torch.inf)

    def is_argmax_invariant(self) -> bool:
        """Return False: a masked id may have the largest logit."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Do nothing: the mask is the same for all requests."""
