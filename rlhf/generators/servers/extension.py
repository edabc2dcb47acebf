"""What vLLM's workers have in a server: an engine that loads weights from files, and an end with it.

vLLM imports this module in each worker (`worker_extension_cls`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo

from rlhf.generators.servers.process import end_with_others
from rlhf.generators.servers.protocol import FILES
from rlhf.generators.vllm.worker_extension import SharedMemoryEngine, WorkerExtension
from rlhf.generators.weights import read_file


@dataclass
class FilesUpdateInfo(WeightTransferUpdateInfo):
    """The data of an update: a safetensors file and the checksums of its tensors, as a request has them."""

    path: str
    version: int
    checksums: dict[str, int]


class FilesEngine(SharedMemoryEngine):
    """A weight-transfer engine of a server, which loads the tensors of a file of the trainer."""

    update_info_cls = FilesUpdateInfo

    def verified(self, update_info: Any) -> list[tuple[str, Tensor]]:
        """Return the tensors of the file by name, which were compared with their checksums."""
        return list(read_file(update_info.path, update_info.version, update_info.checksums))


class ServerExtension(WorkerExtension):
    """Methods added to the workers."""

    def answers(self) -> bool:
        """Return that this worker answers."""
        return True


WeightTransferEngineFactory.register_engine(FILES, FilesEngine)
end_with_others()  # a worker lives on if the main process of its server is killed
