"""One server of vLLM, as the pool of a run uses it: each call over HTTP has a time limit."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import groupby
from typing import Any, NamedTuple

import aiohttp

from rlhf.core.errors import RunError, UserError
from rlhf.core.files import flat
from rlhf.core.formatting import shortened
from rlhf.core.machine import loopback
from rlhf.generators.servers.process import ABORT, GENERATE, LOAD, STATUS
from rlhf.generators.vllm.sampler import NCCL, VLLMFactory, config_folder, engine_arguments
from rlhf.generators.weights import Manifest, TransferError, WeightStore, confirm
from rlhf.processes.servers import Child, program

_CONNECT_S = 5.0
_BYTES_PER_S = 50e6  # at which a server reads weights at least
_POLL_S = 0.25  # between two looks at a server that starts
_WATCH_S = 0.5  # between two looks at the processes of a server
_PING_S = 5.0  # between two questions to a server


class Gone(Exception):
    """An error: a server cannot be used until it has started again; the message is a predicate."""


class NoAnswer(Exception):
    """An error: a call got no valid answer; the server may be well. The message is a predicate."""


class Reply(NamedTuple):
    """A sampled response."""

    ids: list[int]
    logprobs: list[float]  # at the sampling temperature
    versions: list[int]  # of the weights that sampled each token
    ended: bool  # by itself, not because it was aborted


@dataclass(eq=False)
class Server:
    """A server and what it does now. All methods are called in the thread of the pool.

    Args:
        name: in messages, such as "server 0".
        url: its address; None: `child` has it.
        key: the key of its routes; None: it has none.
        start_s: seconds until it must be ready.
        answer_s: seconds in which it must answer a call that is no request for tokens.
        request_s: seconds in which it must sample a response.
        child: its processes, if the run starts it.
        accept: raises an error if a server with this status cannot be used.
    """

    name: str
    url: str | None
    key: str | None
    start_s: float
    answer_s: float
    request_s: float
    child: Child | None = None
    accept: Callable[[Mapping[str, Any]], None] = lambda about: None
    session: aiohttp.ClientSession | None = None
    about: dict[str, Any] = field(default_factory=dict)  # its status when it was ready; empty: never
    version: int | None = None  # of its weights, as it confirmed; None: random weights
    loading: Manifest | None = None
    running: dict[asyncio.Task[None], Any] = field(default_factory=dict)  # requests for tokens
    tokens: int = 0  # of these requests, at most
    broken: asyncio.Future[None] | None = None  # gets an error if it must be given up

    @property
    def slots(self) -> int:
        """The number of responses that it samples at a time."""
        return int(self.about["max_num_seqs"])

    async def start(self) -> None:
        """Start the server if the run does so, and wait until it is ready.

        Raises:
            Gone: it was not ready in time, or a signal ended it.
            RunError: it cannot start, or did not answer when the run began.
            UserError: it must not be used.
        """
        self.version = self.loading = None
        loop = asyncio.get_running_loop()
        if self.child is not None:
            self.url = self.child.start()
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        # A connection for each call: a server closes idle ones, and those of a call that failed
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.session = aiohttp.ClientSession(headers=headers, connector=connector)
        until = loop.time() + self.start_s
        while True:
            try:
                self.about = await self.status(min(self.answer_s, self.start_s))
                return self.accept(self.about)
            except NoAnswer as error:
                if self.child is not None and (how := self.child.ended()):
                    if how.startswith("killed"):
                        raise Gone(f"died ({how})") from None
                    raise RunError(
                        f"{self.name} must start, but it ended ({how}); {self.child.output()}"
                    ) from None
                if loop.time() > until:
                    late = f"was not ready within the start limit, {self.start_s:g} s: it {error}"
                    if self.child is None and not self.about:
                        raise RunError(f"{self.name} {late}; start it, or correct generator.urls") from None
                    raise Gone(late) from None
                await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """Cancel all requests, and end the processes of a server that the run started."""
        for task in self.running:
            task.cancel()
        if self.session is not None:
            await self.session.close()
        if self.child is not None:
            await asyncio.to_thread(self.child.stop)

    async def watch(self, is_asked: Callable[[], bool] = lambda: True) -> None:
        """Look whether the server still runs and answers.

        Args:
            is_asked: whether it must answer now.

        Raises:
            Gone: it does not.
        """
        loop = asyncio.get_running_loop()
        asked = loop.time()
        while True:
            await asyncio.sleep(_WATCH_S)
            if self.child is not None and (how := self.child.ended()):
                raise Gone(f"died ({how})")
            if is_asked() and loop.time() > asked + _PING_S:
                await self.check()
                asked = loop.time()

    async def check(self) -> None:
        """Ask the server for its state.

        Raises:
            Gone: it does not answer, or was started again by somebody else.
        """
        try:
            state = await self.status()
        except NoAnswer as error:
            raise Gone(str(error)) from None
        if state["start"] != self.about["start"]:
            raise Gone("was started again")

    def breaks(self, error: Exception) -> None:
        """Let the pool give the server up, because of an error of a request."""
        assert self.broken is not None
        if not self.broken.done():
            self.broken.set_exception(error)

    async def status(self, limit_s: float | None = None) -> dict[str, Any]:
        """Return the state of the server.

        Raises:
            NoAnswer: engine or workers did not answer in time.
            RunError: the server does not accept the key.
        """
        state = await self._call("GET", STATUS, None, limit_s or self.answer_s)
        if not {"start", "max_num_seqs"} <= state.keys():
            raise NoAnswer(f"answered {STATUS} without its state ({shortened(repr(state), 200)})")
        return state

    async def load(self, manifest: Manifest, link: WeightStore) -> None:
        """Load weights, which must be confirmed.

        Args:
            manifest: the weights.
            link: sends them to this server.

        Raises:
            Gone: the load failed, or version or checksums differ from what the trainer sent.
        """
        self.loading = manifest
        limit_s = self.answer_s + sum(entry.bytes for entry in manifest.entries) / _BYTES_PER_S
        offered = link.offer(manifest, lambda: None)  # the limit ends a call that gets no weights
        body = {
            "version": offered.version,
            "limit_s": limit_s,
            "group": offered.group,
            "update": offered.update_info(),
        }
        try:
            answer = await self._call("POST", LOAD, body, limit_s)
            confirm(manifest, answer["version"], dict(answer["checksums"]))
            await asyncio.to_thread(link.finish, manifest)
        except (NoAnswer, KeyError, TypeError, ValueError, TransferError) as error:
            cause: Exception = error
            try:
                link.check()
            except RunError as unsent:
                cause = unsent
            raise Gone(f"did not load version {manifest.version} ({cause})") from None
        self.version, self.loading = manifest.version, None

    async def generate(self, name: str, ids: Sequence[int], parameters: Mapping[str, Any]) -> Reply:
        """Sample one response, which `abort` ends early by its name.

        Raises:
            NoAnswer: there is no valid response.
        """
        body = {"request_id": name, "token_ids": ids, "sampling_params": parameters}
        answer = await self._call("POST", GENERATE, body, self.request_s)
        try:
            (choice,) = answer["choices"]
            content, found = choice["logprobs"]["content"], choice["token_ids"]
            logprobs = [float(token["logprob"]) for token in content]
            versions = [
                int(span["version"])
                for span in choice["weight_versions"]
                for _ in range(span["start"], span["end"])
            ]
            ended = choice["finish_reason"] in ("length", "stop")
            complete = (
                (ended or choice["finish_reason"] == "abort")
                and ended <= len(found) <= parameters["max_tokens"]
                and found == [token["token_id"] for token in content]
                and len(found) == len(versions)
                and all(map(math.isfinite, logprobs))
            )
        except (KeyError, TypeError, ValueError):
            complete = False
        if not complete:
            raise NoAnswer(f"answered with an incomplete response ({shortened(repr(answer), 200)})")
        return Reply(found, logprobs, versions, ended)

    async def abort(self, name: str) -> None:
        """End a response early; `generate` returns it. An error shows in its answer."""
        with suppress(NoAnswer):
            await self._call("POST", ABORT, {"request_ids": [f"generate-tokens-{name}"]}, self.answer_s)

    async def _call(self, method: str, path: str, body: Any, limit_s: float) -> dict[str, Any]:
        assert self.session is not None
        limit = aiohttp.ClientTimeout(total=limit_s, sock_connect=_CONNECT_S)
        try:
            async with self.session.request(
                method, f"{self.url}{path}", json=body, timeout=limit, allow_redirects=False
            ) as answer:
                content, status = await answer.read(), answer.status
        except TimeoutError:
            raise NoAnswer(f"did not answer {path} within {limit_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(f"did not answer {path} ({type(error).__name__}: {error})") from None
        if status in (401, 403):
            raise RunError(
                f"{self.name} must accept the key of this run, got status {status}; set "
                "generator.key_variable=<environment variable with the key of the servers>"
            )
        with suppress(ValueError):
            found = json.loads(content)
            if status == 200 and isinstance(found, dict):
                return found
        text = shortened(repr(content.decode(errors="replace")), 300)
        raise NoAnswer(f"answered {path} with status {status} ({text})")


# Whether a server that a run did not start samples what the run trains.


# Values in the config of a model that do not change its output, or that the flags of the server set
_OTHER = {
    *("_name_or_path", "name_or_path", "transformers_version", "architectures", "auto_map", "use_cache"),
    *("dtype", "torch_dtype", "head_dtype", "bos_token_id", "eos_token_id", "pad_token_id"),
}


def check(settings: VLLMFactory, config: Mapping[str, Any], url: str, about: Mapping[str, Any]) -> None:
    """Check the status of a server.

    Args:
        settings: what the run needs.
        config: the config of the trained model, as a dictionary.
        url: the address of the server.
        about: the status of the server.

    Raises:
        UserError: a setting or the model of the server is another one. The message has the command of a
            server that the run can use.
    """
    ours, theirs = (
        {name: value for name, value in flat(tree) if name.rpartition(".")[2] not in _OTHER}
        for tree in (json.loads(json.dumps(config, default=str)), about["model"])
    )
    ours |= {"dtype": settings.dtype, "head_dtype": "float32" if settings.float32_head else settings.dtype}
    ours |= {"weights": settings.way, "absent_ids": ranges(settings.absent_ids) or "none"}
    theirs |= {name: about[name] for name in ("dtype", "head_dtype", "weights")}
    theirs |= {"absent_ids": ranges(about["absent_ids"]) or "none"}
    if about["max_model_len"] < settings.max_model_len:
        ours["max_model_len"], theirs["max_model_len"] = settings.max_model_len, about["max_model_len"]
    shared = (name for name in ours if name in theirs)
    wrong = [f"{n} {theirs[n]} (the run has {ours[n]})" for n in shared if ours[n] != theirs[n]]
    if wrong:
        flags = [settings.model, "--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len)]
        flags += ["--float32-head"] if settings.float32_head else []
        flags += ["--nccl"] if settings.way == NCCL else []
        flags += ["--absent-ids", ranges(settings.absent_ids)] if settings.absent_ids else []
        raise UserError(
            "generator.urls must name servers of the model and the settings of the run, got "
            f"{url} with {'; '.join(wrong)}; start it with: python -m rlhf.serve {shlex.join(flags)}"
        )


def ranges(ids: Sequence[int]) -> str:
    """Return rising numbers as ranges, such as `7,50277-50303`."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def numbers(text: str) -> tuple[int, ...]:
    """Return the rising numbers of ranges such as `7,50277-50303`.

    Raises:
        ValueError: the text has another form.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        found.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(found))


# Start of a server of vLLM: its command and its environment.


def command(settings: VLLMFactory, host: str) -> list[str]:
    """Return the command that serves the model of `settings`, with random weights until the first load.

    `Child` adds the port.

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
    arguments = engine_arguments(settings, settings.config()) | {
        "model": config_folder(settings.model),
        "host": host,
        "served_model_name": "policy",
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",
        "weight_transfer_config": {"backend": settings.way},
        "additional_config": {"absent_ids": list(settings.absent_ids)},
        "enable_scale_out": True,  # tokens in, tokens out
        "disable_fastapi_docs": True,
        "disable_uvicorn_access_log": True,
    }
    return program(arguments)


def variables(settings: VLLMFactory, key: str | None) -> dict[str, str]:
    """Return the environment of a server; `key` is the one that its routes ask for."""
    own = {
        "VLLM_PLUGINS": "rlhf",
        **settings.variables(),
        # All processes of a server are on this host, and none of their sockets asks for a key. For weights by
        # NCCL from another host, the user sets the interface
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": loopback(),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", loopback()),
    }
    if not settings.gpu:
        own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return own | ({"VLLM_API_KEY": key} if key else {})
