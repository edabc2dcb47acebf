"""What vLLM's workers have in a server: the methods of a generator process, and an end with the server.

vLLM imports this module in each worker (`worker_extension_cls`).
"""

from __future__ import annotations

from rlhf.generators.servers.process import end_with_others
from rlhf.generators.vllm.worker_extension import WorkerExtension


class ServerExtension(WorkerExtension):
    """Methods added to the workers."""

    def answers(self) -> bool:
        """Return that this worker answers."""
        return True


end_with_others()  # a worker lives on if the main process of its server is killed
