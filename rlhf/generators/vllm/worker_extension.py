"""Weights into vLLM, by engines of vLLM's own weight-transfer interface.

vLLM imports this module in each of its workers (`worker_extension_cls`), which registers the engines there. A
round of the interface, driven by `rlhf.generators.vllm.VLLMSampler`:

    start_weight_update()
    update_weights(...)                 tensors are received, their checksums noted, and loaded
    finish_weight_update(version)       vLLM reports this version from here on

The engine for shared memory is our own, and verifies all tensors before it loads the first. Those for CUDA
IPC and NCCL are vLLM's, with a `Witness` in the model's place that sees each tensor before the model does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlhf.generators.transfer.gpu import checksums, fingerprint
from rlhf.generators.transfer.shared_memory import read
from rlhf.generators.transfer.weights import TransferError

if TYPE_CHECKING:
    from rlhf.generators.transfer.weights import Manifest


NAME = "rlhf_{}"  # of an engine, by generator.transfer


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing: a manifest says all."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """The weights of one version."""

    manifest: Manifest


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads what a `Manifest` names. A manifest that is refused leaves the model as it was."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Nothing is loaded yet."""
        self.taken: dict[str, int] = {}

    def start_weight_update(self) -> None:
        """Nothing yet: layers are taken apart for loading once there is what to load (`receive_weights`)."""
        self.taken = {}

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Verify all tensors, then load them.

        Raises:
            TransferError: a tensor is not what the trainer wrote (then nothing is changed), or vLLM has a
                parameter that no tensor went to.
        """
        manifest = update_info.manifest
        weights = list(read(manifest))  # views of the shared memory: nothing is copied here
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(iter(weights))
        finalize_layerwise_reload(self.model, self.model_config)
        check_reached(self.model, loaded)
        self.taken = manifest.checksums()

    def finish_weight_update(self) -> None:
        """Refuse to call a version loaded that was not."""
        if not self.taken:
            raise TransferError("an update of weights must load some before it is finished, got none")

    def shutdown(self) -> None:
        """Nothing is held between updates."""


class Witness:
    """Stands in the model's place while an engine receives: notes each tensor, then hands it on."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.sums: dict[str, Tensor] = {}  # fingerprints, on the device
        self.reached: set[str] | None = set()  # parameters; None: the model does not say

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load some of the tensors."""
        weights = list(weights)
        self.sums |= {name: fingerprint(tensor) for name, tensor in weights}
        loaded: set[str] | None = self.model.load_weights(weights)  # type: ignore[operator]
        self.reached = None if loaded is None or self.reached is None else self.reached | loaded


class Witnessed:
    """What is added to an engine of vLLM, which follows it in the bases: `taken`, and nothing left out."""

    def start_weight_update(self: Any) -> None:
        """As the engine does."""
        self.taken: dict[str, int] = {}
        super().start_weight_update()  # type: ignore[misc]

    def receive_weights(self: Any, update_info: Any) -> None:
        """As the engine does, with the witness as its target."""
        self.witness = Witness(self.model)
        self.set_weight_update_target(self.witness, self.model_config)
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            self.reset_weight_update_target()

    def finish_weight_update(self: Any) -> None:
        """As the engine does, then check that nothing was left as it was.

        Raises:
            TransferError: vLLM has a parameter that no tensor went to.
        """
        super().finish_weight_update()  # type: ignore[misc]
        check_reached(self.model, self.witness.reached)
        self.taken = checksums(self.witness.sums)


class IpcEngine(Witnessed, IPCWeightTransferEngine):
    """vLLM's engine for CUDA IPC."""


class NcclEngine(Witnessed, NCCLWeightTransferEngine):
    """vLLM's engine for NCCL."""


def check_reached(model: torch.nn.Module, reached: set[str] | None) -> None:
    """Raise TransferError where some parameters were not `reached`; None: it is not known."""
    names = {name for name, _ in model.named_parameters()} if reached is not None else set()
    if untouched := sorted(names - (reached or set())):
        raise TransferError(
            f"weights must reach every parameter of vLLM's model, got none for {', '.join(untouched[:3])}: "
            "vLLM maps this architecture's names otherwise"
        )


for transfer, engine in (("shared_memory", SharedMemoryEngine), ("ipc", IpcEngine), ("nccl", NcclEngine)):
    WeightTransferEngineFactory.register_engine(NAME.format(transfer), engine)


class WorkerExtension:
    """What a worker of vLLM can be asked in addition (`LLM.collective_rpc`)."""

    def taken_checksums(self) -> dict[str, int]:
        """Checksums by name of the tensors that this worker loaded last."""
        return self.weight_transfer_engine.taken  # type: ignore[attr-defined]
