"""Builder of a vLLM generator: its weight transfer and its worker processes."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import torch

from rlhf.config.generator import Transfer
from rlhf.core.console import say
from rlhf.core.errors import UserError
from rlhf.generators.generator import Generator, GeneratorContext
from rlhf.generators.process import start
from rlhf.generators.vllm.colocated import ColocatedGenerator
from rlhf.generators.vllm.placement import place, visible
from rlhf.generators.vllm.sampler import VLLMFactory
from rlhf.generators.weights import SharedWeights
from rlhf.generators.weights_gpu import CudaIpc, Nccl
from rlhf.models.modules import absent_ids
from rlhf.processes.worker import environment

if TYPE_CHECKING:
    from rlhf.config.generator import VLLMConfig
    from rlhf.generators.weights import WeightStore


def build(config: VLLMConfig, context: GeneratorContext) -> Generator:
    """Return a generator that samples with vLLM.

    vLLM starts with the config of the policy and random weights; `load` replaces the weights.

    Raises:
        UserError: the host has too few GPUs, or `generator.transfer` is not possible on the devices.
    """
    devices = place(config, torch.cuda.device_count())
    variables = [environment(context.threads, torch.device("cpu")) for _ in range(config.replicas)]
    if devices:
        each, now = config.tensor_parallel_size, os.environ.get("CUDA_VISIBLE_DEVICES")
        for i, own in enumerate(variables):
            own["CUDA_VISIBLE_DEVICES"] = visible(devices[i * each : (i + 1) * each], now)
            own["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", "lo")  # all are on this host
    elif config.shares_gpu:
        say(f"generator={config.name} frees no memory between requests: on a CPU vLLM cannot sleep")
    trainer = context.policy.device
    transfer = route(config, bool(devices), trainer, torch.distributed.is_nccl_available())
    made = factory(config, context, bool(devices), transfer)
    store = build_store(transfer, trainer, getattr(torch, made.dtype), len(devices))
    single = partial(ColocatedGenerator, trainer) if made.sleeps else None
    return start(config, context, made, variables, store, single)


def factory(
    config: VLLMConfig,
    context: GeneratorContext,
    gpu: bool,
    transfer: Transfer = Transfer.shared_memory,
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
            "generator.transfer must be auto or shared_memory where trainer and vLLM are not both on GPUs "
            f"(the trainer is on {trainer.type}, vLLM on {'cuda' if gpu else 'cpu'}), got {asked.value}; "
            "set generator.transfer=auto"
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
