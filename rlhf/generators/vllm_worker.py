"""Weights from shared memory into vLLM, as an engine of vLLM's own weight-transfer interface.

vLLM imports this module in each of its workers (`worker_extension_cls`), which registers the engine there. A
round of the interface, driven by `rlhf.generators.vllm.VLLMSampler`:

    start_weight_update()
    update_weights(manifest)            all tensors are read and verified, and only then loaded
    finish_weight_update(version)       vLLM reports this version from here on
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlhf.generators.transfer import Manifest, TransferError, read

NAME = "rlhf_shared_memory"


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
                parameter that none of them went to.
        """
        manifest = update_info.manifest
        weights = list(read(manifest))  # views of the shared memory: nothing is copied here
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(iter(weights))
        finalize_layerwise_reload(self.model, self.model_config)
        left = self.model.named_parameters() if loaded is not None else []
        if untouched := sorted({name for name, _ in left} - (loaded or set())):
            raise TransferError(
                f"version {manifest.version} must reach every parameter of vLLM's model, got none for "
                f"{', '.join(untouched[:3])}: vLLM maps this architecture's names otherwise"
            )
        self.taken = manifest.checksums()

    def finish_weight_update(self) -> None:
        """Refuse to call a version loaded that was not."""
        if not self.taken:
            raise TransferError("an update of weights must load some before it is finished, got none")

    def shutdown(self) -> None:
        """Nothing is held between updates."""


WeightTransferEngineFactory.register_engine(NAME, SharedMemoryEngine)


class WorkerExtension:
    """What a worker of vLLM can be asked in addition (`LLM.collective_rpc`)."""

    def taken_checksums(self) -> dict[str, int]:
        """Checksums by name of the tensors that this worker loaded last."""
        return self.weight_transfer_engine.taken  # type: ignore[attr-defined]
