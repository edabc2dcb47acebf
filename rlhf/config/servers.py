"""Section of the generator whose servers may run on other machines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from rlhf.config.generator import Transfer, VLLMConfig
from rlhf.config.schema import Affects, entry, number, option
from rlhf.config.services import service_problems, token_problems, url_problems
from rlhf.core.network import STATUS, is_loopback
from rlhf.core.pasting import setting

INTERFACE = "NCCL_SOCKET_IFNAME"  # environment variable with the network interface of NCCL


@option("generator", "vllm_server", part="rlhf.generators.servers.pool:build")
@dataclass(kw_only=True, slots=True)
class VLLMServerConfig(VLLMConfig):
    """Sampling with servers of vLLM, which the run starts on this machine, or which run anywhere."""

    samples_singly: ClassVar[bool] = True

    name: str = "vllm_server"
    servers: int = number(
        1, least=1, means="servers that the run starts on this machine", affects=Affects.speed
    )
    urls: list[str] | None = entry(
        None,
        means="addresses of servers that run already (launchers/serve.sh); null: the run starts them",
        affects=Affects.speed,
    )
    key_variable: str | None = entry(
        None,
        means="environment variable with the key of the servers in urls; beyond this machine they need one",
        affects=Affects.speed,
    )
    folder: str | None = entry(
        None,
        means="folder for the weights, which trainer and servers can read; null: in the run folder",
        affects=Affects.speed,
    )
    answer_limit_s: float = number(
        60.0,
        above=0,
        means="seconds in which a server must answer a call that samples nothing; then it is given up",
        affects=Affects.speed,
    )

    def start_limit(self, on_gpu: bool) -> float:
        """Return `start_limit_s`; if null, 1200 on GPUs and 600 without: a server has three processes."""
        return self.start_limit_s or (1200.0 if on_gpu else 600.0)

    @property
    def gpus(self) -> int:
        """The number of GPUs of the servers that the run starts."""
        return 0 if self.urls else self.tensor_parallel_size * self.servers

    def processes(self, max_lag: int) -> int:
        """Return the number of servers that the run starts."""
        return 0 if self.urls else self.servers

    def route(self, gpus: bool, nccl: bool = True) -> Transfer:
        """Return nccl if it was chosen; otherwise weights are files, which leave the GPU at once."""
        return Transfer.nccl if self.transfer is Transfer.nccl else Transfer.shared_memory

    def problems(self, at: str) -> Iterator[str]:
        """Yield an error for keys of one process, or if the addresses or the key of the servers are wrong."""
        yield from VLLMConfig.problems(self, at)
        per_rank = str(self.per_rank).lower()
        for key, value, only in ("replicas", self.replicas, 1), ("per_rank", per_rank, "false"):
            if value != only:
                yield (
                    f"{at}.{key} must be {only} with generator=vllm_server (all ranks use the same servers), "
                    f"got {value}; set {at}.{key}={only}"
                )
        if self.transfer not in (Transfer.auto, Transfer.nccl):
            yield (
                f"{at}.transfer must be auto (servers read weights from files) or nccl (between GPUs) with "
                f"generator=vllm_server, got {self.transfer.value}; set {at}.transfer=auto"
            )
        if not self.urls:
            return
        whole = [
            url if re.match("https?://", url) else f"http://{url.rpartition('://')[2]}" for url in self.urls
        ]
        example, key = "http://127.0.0.1:8000", f"{at}.key_variable"
        wrong = [
            text for url in self.urls for text in url_problems(f"{at}.urls", url, key, "a server", example)
        ]
        remedy = f"set {setting(f'{at}.urls', whole)}"
        yield from (text.replace(f"set {at}.urls={example}", remedy) for text in wrong)
        if len({*self.urls}) < len(self.urls):
            yield f"{at}.urls must name each server once, got {self.urls}; remove the second of both"
        if self.key_variable is not None:
            yield from token_problems(f"{at}.key_variable", self.key_variable)
        elif not wrong and not all(map(is_loopback, self.urls)):
            yield (
                f"{at}.key_variable must name an environment variable with the key of the servers (they are "
                f"on other hosts, where everybody could use them), got null; set {at}.key_variable=RLHF_KEY"
            )

    def job_problems(self, at: str) -> Iterator[str]:
        """Yield an error for a server that refuses connections or the key, and without a network of NCCL."""
        if (
            self.transfer is Transfer.nccl
            and not all(map(is_loopback, self.urls or []))
            and not os.environ.get(INTERFACE)
        ):
            yield (
                f"{INTERFACE} must be a network interface with {at}.transfer=nccl and servers on other hosts "
                f"(by default NCCL uses the loopback one), got nothing; run: export {INTERFACE}=<interface>"
            )
        for url in self.urls or []:
            about = url, "start it with launchers/serve.sh", f"{at}.key_variable", self.key_variable
            yield from service_problems(f"{at}.urls", *about, STATUS)
