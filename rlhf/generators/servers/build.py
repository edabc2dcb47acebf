"""Builder of a generator of servers."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from secrets import token_urlsafe
from typing import TYPE_CHECKING

import torch

from rlhf.config.generator import Transfer
from rlhf.generators.process import annotated
from rlhf.generators.servers.attach import check
from rlhf.generators.servers.launch import command, config_of, on_port, variables
from rlhf.generators.servers.pool import ServerPool
from rlhf.generators.servers.server import Child, Server
from rlhf.generators.vllm.generator import build_store, factory, route
from rlhf.generators.vllm.placement import place, visible
from rlhf.generators.weights import FileWeights
from rlhf.processes.worker import environment

if TYPE_CHECKING:
    from rlhf.config.servers import VLLMServerConfig
    from rlhf.generators.generator import Generator, GeneratorContext
    from rlhf.generators.vllm.sampler import VLLMFactory

FOLDER = "weights"  # in the run folder


def build(config: VLLMServerConfig, context: GeneratorContext) -> Generator:
    """Return a generator that samples with the servers of `config.urls`, or with servers that it starts.

    Raises:
        UserError: the host has too few GPUs, or vLLM does not support the model.
    """
    devices = () if config.urls else place(config, torch.cuda.device_count())
    trainer, nccl = context.policy.device, torch.distributed.is_nccl_available()
    transfer = route(config, bool(devices or config.urls), trainer, nccl)  # named servers tell theirs
    settings = factory(config, context, bool(devices), transfer)
    start_s = config.start_limit(on_gpu=torch.cuda.is_available())
    limits = start_s, config.answer_limit_s, config.request_limit_s
    if config.urls:
        key = os.environ[config.key_variable] if config.key_variable else None
        accept = partial(check, settings, config_of(settings).to_dict())
        servers = [Server(url, url, key, *limits, accept=partial(accept, url)) for url in config.urls]
    else:
        key = token_urlsafe()
        children = _children(config, context, settings, devices, key)
        servers = [Server(f"server {i}", None, key, *limits, child) for i, child in enumerate(children)]
    # Several runs may have the same generator.folder
    folder = Path(config.folder, context.folder.name) if config.folder else context.folder / FOLDER
    dtype, files = getattr(torch, settings.dtype), transfer is Transfer.shared_memory
    workers = config.tensor_parallel_size
    store = FileWeights(folder, dtype) if files else build_store(transfer, trainer, dtype, workers)
    pool = ServerPool(
        servers,
        store,
        settings,
        vocabulary=context.policy.config.get_text_config().vocab_size,
        restarts=config.restarts,
        in_flight=context.in_flight,
    )
    return annotated(pool, config, context)


def _children(
    config: VLLMServerConfig,
    context: GeneratorContext,
    settings: VLLMFactory,
    devices: tuple[int, ...],
    key: str,
) -> list[Child]:
    """Return the servers that the run starts on this host, each with its GPUs."""
    arguments, children = command(settings, "127.0.0.1"), []
    for i in range(config.servers):
        own = environment(context.threads, torch.device("cpu")) | variables(settings, key)
        if devices:
            each, now = config.tensor_parallel_size, os.environ.get("CUDA_VISIBLE_DEVICES")
            own["CUDA_VISIBLE_DEVICES"] = visible(devices[i * each : (i + 1) * each], now)
        log = context.folder / f"server-{i}.log"
        children.append(Child(partial(on_port, arguments), own, log))
    return children
