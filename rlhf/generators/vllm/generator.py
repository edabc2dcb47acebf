"""Builder of a vLLM generator: its weight transfer and its worker processes."""

from __future__ import annotations

import gc
import os
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from rlhf.config.generators import Transfer, VLLMConfig
from rlhf.core.batch import Prompts, Rollouts, Sampling
from rlhf.core.errors import UserError
from rlhf.core.launched import local_rank, local_world_size
from rlhf.generators.generator import Generator, GeneratorContext
from rlhf.generators.process import WorkerGenerator, start
from rlhf.generators.vllm.sampler import VLLMFactory
from rlhf.generators.weights import CudaIpc, Manifest, Nccl, SharedWeights, WeightStore
from rlhf.models.modules import absent_ids
from rlhf.processes.worker import Job, environment
from rlhf.terminal.console import say


def build(config: VLLMConfig, context: GeneratorContext) -> Generator:
    """Return a generator that samples with vLLM.

    vLLM starts with the config of the policy and random weights; `load` replaces the weights.

    Raises:
        UserError: the host has too few GPUs, or `generator.transfer` is not possible on the devices.
    """
    devices = place(config, torch.cuda.device_count())
    variables = [variables_of(i, devices, config, context.threads) for i in range(config.replicas)]
    if config.shares_gpu and not devices:
        say(f"generator={config.name} frees no memory between requests: on a CPU vLLM cannot sleep")
    trainer = context.policy.device
    transfer = route(config, bool(devices), trainer, torch.distributed.is_nccl_available())
    made = factory(config, context, bool(devices), transfer)
    store = build_store(transfer, trainer, getattr(torch, made.dtype), len(devices))
    single = partial(ColocatedGenerator, trainer) if made.sleeps else None
    return start(config, context, made, variables, store, single)


def factory(
    config: VLLMConfig, context: GeneratorContext, gpu: bool, transfer: Transfer = Transfer.shared_memory
) -> VLLMFactory:
    """Return the settings that start vLLM for the policy of a run, on GPUs (`gpu`) or on the CPU."""
    assert context.model.policy is not None, "validated: a policy is named or made"
    return VLLMFactory(
        model=context.model.policy,
        trust_remote_code=context.model.trust_remote_code,
        dtype=(config.dtype or context.model.dtype).value,
        float32_head=context.model.float32_head,
        max_model_len=context.prompt_tokens + config.response_length,
        max_num_seqs=config.max_num_seqs,
        memory=config.memory or (config.on_gpu if gpu else config.in_ram),
        enforce_eager=not gpu if config.enforce_eager is None else config.enforce_eager,
        tensor_parallel_size=config.tensor_parallel_size,
        gpu=gpu,
        sleeps=config.shares_gpu and gpu,
        in_flight=context.in_flight,
        transfer=transfer.value,
        stop_ids=tuple(context.stop_ids),
        pad_id=context.tokenizer.pad_token_id,
        absent_ids=tuple(absent_ids(context.policy)),
        seed=context.seed,
        environment=context.environment,
    )


def route(config: VLLMConfig, gpu: bool, trainer: torch.device, nccl: bool) -> Transfer:
    """Return the way in which weights are transferred from the trainer's device to vLLM.

    Args:
        config: the section of the generator.
        gpu: whether vLLM is on GPUs.
        trainer: the device of the trained policy.
        nccl: whether torch has NCCL.

    Raises:
        UserError: `generator.transfer` is not possible on these devices.
    """
    asked, gpus = config.transfer, gpu and trainer.type == "cuda"
    if asked is Transfer.auto:
        return config.route(gpus, nccl)
    if asked is not Transfer.shared_memory and not gpus:
        raise UserError(
            f"generator.transfer must be auto or shared_memory with the trainer on {trainer.type} and vLLM "
            f"on {'cuda' if gpu else 'cpu'}, got {asked.value}; set generator.transfer=auto"
        )
    if asked is Transfer.nccl and not nccl:
        raise UserError(
            "generator.transfer must not be nccl where torch is built without NCCL, got nccl; "
            "set generator.transfer=auto"
        )
    return asked


def build_store(transfer: Transfer, trainer: torch.device, dtype: torch.dtype, workers: int) -> WeightStore:
    """Return the store that sends weights to vLLM, which computes in `dtype` on `workers` GPUs."""
    if transfer is Transfer.ipc:
        return CudaIpc(trainer, dtype)
    return Nccl(trainer, dtype, workers) if transfer is Transfer.nccl else SharedWeights(dtype)


# A generator process on the trainer's GPU: trainer and vLLM use the memory of the GPU in turn.
#
#     trainer                                    vLLM free unused memory, start vLLM       ──▶   allocate all,
#     free keys and values free unused memory, queue the load   ──▶   allocate the weights, load them free
#     unused memory, queue a request  ──▶   allocate keys and values, sample, free weights, keys and values
#     queue another request                ──▶   load the same version again, sample, free
#
# torch keeps freed memory in its cache, where other processes cannot use it. So the trainer empties the cache
# before each job. vLLM discards its weights after a request instead of copying them to RAM. The trainer keeps
# each version until the next one (`rlhf.generators.process`), so the weights can always be loaded again.


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


# The GPUs that vLLM gets beside the trainer, or with it.


def place(config: VLLMConfig, gpus: int) -> tuple[int, ...]:
    """Return the GPUs of the generator on a host with `gpus` GPUs; empty: vLLM uses the CPU.

    The ranks of the trainer use the first GPUs of the host. With `per_rank`, the generator of each rank has
    its own GPUs after the GPUs of the trainer, or shares the GPU of its rank. The result lists the GPUs of
    the first replica, then the GPUs of the second replica, and so on.

    Raises:
        UserError: the host has too few GPUs, or the trainer uses a GPU in `generator.devices`.
    """
    size, name = config.gpus, config.name
    if gpus == 0:
        if config.devices or (size := config.tensor_parallel_size) > 1:
            raise UserError(
                "generator.devices must be null and generator.tensor_parallel_size 1 without GPUs, got "
                f"{config.devices} and {size}; set generator.devices=null generator.tensor_parallel_size=1"
            )
        return ()
    trainer = 0 if config.shares_gpu else local_world_size()
    first = trainer + (local_rank() * size if config.per_rank else 0)
    devices = tuple(config.devices or range(first, first + size))
    if max(devices) >= gpus or (trainer and min(devices) < trainer):
        own = f"; set generator={name}_colocated to share the trainer's" if trainer else ""
        raise UserError(
            f"generator={name} must have {size} of the {gpus} GPUs here"
            + (f", beside the first {trainer}, which the trainer has" if trainer else "")
            + f", got {list(devices)}{own}"
        )
    return devices


def variables_of(i: int, devices: tuple[int, ...], config: VLLMConfig, threads: int | None) -> dict[str, str]:
    """Return the environment variables of replica or server `i`, which has its part of the GPUs `devices`."""
    own = environment(threads, torch.device("cpu"))
    if devices:
        size, now = config.tensor_parallel_size, os.environ.get("CUDA_VISIBLE_DEVICES")
        own["CUDA_VISIBLE_DEVICES"] = visible(devices[i * size : (i + 1) * size], now)
        own["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", "lo")  # all are on this host
    return own


def visible(devices: tuple[int, ...], visible_now: str | None) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for the GPUs `devices`.

    Args:
        devices: indices into the GPUs that are visible now.
        visible_now: the present value of CUDA_VISIBLE_DEVICES; None or empty: all GPUs are visible.
    """
    names = visible_now.split(",") if visible_now else None
    return ",".join(names[i] if names else str(i) for i in devices)
