"""Start of a server of vLLM: its command and its environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from rlhf.config.generator import Transfer
from rlhf.core.errors import UserError
from rlhf.generators.servers.protocol import FILES, NCCL
from rlhf.generators.vllm.sampler import config_folder, engine_arguments
from rlhf.processes.interfaces import loopback

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rlhf.generators.vllm.sampler import VLLMFactory


def command(settings: VLLMFactory, host: str) -> list[str]:
    """Return the command that serves the model of `settings`, with random weights until the first load.

    `on_port` adds the port.

    Raises:
        UserError: vLLM is not installed, would not find the plugin of this project, or does not support the
            head size of the model on a CPU.
    """
    if find_spec("vllm") is None:
        raise UserError("a server needs vLLM, which is not installed; run: pip install -e '.[vllm]'")
    if not entry_points(group="vllm.endpoint_plugins", name="rlhf"):
        raise UserError(
            "a server needs the plugin of this project for vLLM (pip installs its entry point), got none; "
            "run: pip install -e ."
        )
    arguments = engine_arguments(settings, config_of(settings)) | {
        "model": config_folder(settings.model),
        "host": host,
        "served_model_name": "policy",
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",
        "weight_transfer_config": {"backend": way(settings)},
        "worker_extension_cls": "rlhf.generators.servers.extension.ServerExtension",
        "additional_config": {"absent_ids": list(settings.absent_ids)},
        "enable_scale_out": True,  # tokens in, tokens out
        "disable_fastapi_docs": True,
        "disable_uvicorn_access_log": True,
    }
    return [sys.executable, "-P", "-m", "rlhf.generators.servers.process", *_flags(arguments)]


def way(settings: VLLMFactory) -> str:
    """Return how the weights come to a server, as vLLM names it."""
    return NCCL if settings.transfer == Transfer.nccl.value else FILES


def config_of(settings: VLLMFactory) -> PreTrainedConfig:
    """Return the config of the model of `settings`."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        config_folder(settings.model), trust_remote_code=settings.trust_remote_code
    )
    return config


def on_port(arguments: list[str], port: int) -> list[str]:
    """Return the command of a server that listens on a port."""
    return [*arguments, "--port", str(port)]


def variables(settings: VLLMFactory, key: str | None) -> dict[str, str]:
    """Return the environment of a server; `key` is the one that its routes ask for."""
    own = {
        "VLLM_PLUGINS": "rlhf",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # All processes of a server are on this host, and none of their sockets asks for a key. For weights by
        # NCCL from another host, the user sets the interface
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": loopback(),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", loopback()),
    }
    if settings.enforce_eager and not settings.gpu:
        own["TORCHDYNAMO_DISABLE"] = "1"  # otherwise parts of vLLM's sampler compile for 20 s
    if not settings.gpu:
        own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return own | ({"VLLM_API_KEY": key} if key else {})


def _flags(arguments: dict[str, Any]) -> Iterator[str]:
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, list):
            yield from (f"--{flag}", *map(str, value))
        elif value not in (None, {}):
            yield from (f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value))
