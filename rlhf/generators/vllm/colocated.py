"""A generator process on the trainer's GPU: trainer and vLLM use the memory of the GPU in turn.

    trainer                                    vLLM
    free unused memory, start vLLM       ──▶   allocate all, free keys and values
    free unused memory, queue the load   ──▶   allocate the weights, load them
    free unused memory, queue a request  ──▶   allocate keys and values, sample, free weights, keys and values
    queue another request                ──▶   load the same version again, sample, free

torch keeps freed memory in its cache, where other processes cannot use it. So the trainer empties the cache
before each job. vLLM discards its weights after a request instead of copying them to RAM. The trainer keeps
each version until the next one (`rlhf.generators.process`), so the weights can always be loaded again.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from rlhf.generators.process import WorkerGenerator

if TYPE_CHECKING:
    from concurrent.futures import Future

    from rlhf.core.batch import Prompts, Rollouts, Sampling
    from rlhf.generators.weights import Manifest
    from rlhf.processes.worker import Job


class ColocatedGenerator(WorkerGenerator):
    """A generator whose process uses the trainer's GPU and loads the weights before every request.

    Args:
        device: the trainer's GPU.
        arguments: the other arguments are those of `WorkerGenerator`.
    """

    def __init__(self, device: torch.device, *arguments: Any) -> None:
        self.device = device
        self.loaded = False  # whether the process has weights: False after a request
        super().__init__(*arguments)

    def put(self, job: Job) -> Future[Any]:
        """Free the unused GPU memory of the trainer, then queue a job.

        The trainer's thread calls this method, so the trainer computes nothing at this time. The snapshot of
        a load has already been written.
        """
        free_unused_memory(self.device)
        return super().put(job)

    # -- the carrier thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Free the unused GPU memory of the trainer, then start a process.

        The trainer may compute at this time: the allocator of torch is thread-safe, and only memory that no
        tensor uses is freed.
        """
        free_unused_memory(self.device)
        super().start()

    def hand_over(self, manifest: Manifest) -> None:
        """Load weights into the process; see `WorkerGenerator.hand_over`."""
        super().hand_over(manifest)
        self.loaded = True

    def sample(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        """Return the answer to a request; first load the confirmed weights again if the process has none.

        The arguments and errors are those of `WorkerGenerator.sample`.
        """
        if not self.loaded:
            assert self.confirmed is not None, "load weights before the first request"
            self.hand_over(self.confirmed)
        self.loaded = False
        return super().sample(prompts, sampling)


def free_unused_memory(device: torch.device) -> None:
    """Return the GPU memory that no tensor uses from torch's cache to the GPU; on a CPU, do nothing.

    Memory of tensors in reference cycles is freed too. Memory that another stream uses becomes free only
    after its work has ended, so the function waits for all work on the GPU.
    """
    if device.type != "cuda":
        return
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
