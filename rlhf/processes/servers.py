"""Servers of vLLM that a run starts on this machine: their processes, and one for each model that judges."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from rlhf.core.errors import UserError
from rlhf.core.machine import model_names
from rlhf.processes.signals import end_wait
from rlhf.processes.worker import Spawned
from rlhf.terminal.console import say

SCRATCH = "rlhf-server-"  # begin of the name of a server's own folder for temporary files
_LOG_LINES = 5  # of a server that did not start, in the error
_POLL_S = 0.5  # between two looks at a server that starts
_START_S = 1200.0  # until the server of a judge must answer


@dataclass
class Child:
    """The processes of a server on this machine, which are one process group.

    Args:
        command: the command of the server, without the port.
        environment: environment variables, in addition to those of the trainer without its rank.
        log: file for the output; None: the output of this process.
        host: the host in the address of the server.
        port: the port; 0: a free one at each start.
    """

    command: list[str]
    environment: Mapping[str, str]
    log: Path | None
    host: str = "127.0.0.1"
    port: int = 0
    process: Spawned | None = None

    def start(self) -> str:
        """Start the server, and return its address."""
        port = self.port or free_port()
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") if self.log else nullcontext() as log:
            self.process = Spawned([*self.command, "--port", str(port)], self.environment, log, SCRATCH)
        return f"http://{self.host}:{port}"

    def ended(self) -> str | None:
        """Return how the server ended; None: it runs."""
        return None if self.process is None or self.process.poll() is None else self.process.ending()

    def stop(self) -> None:
        """Kill all processes of the server, and remove its temporary files."""
        if self.process is not None:
            self.process.end()
        self.process = None

    def output(self) -> str:
        """Return where the output is, and its end, for an error."""
        if self.log is None:
            return "its output is above"
        lines = []
        with suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return f"its log is {self.log}: {' | '.join(filter(str.strip, lines))}"


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def program(arguments: Mapping[str, Any]) -> list[str]:
    """Return the command of vLLM's server, which ends with this process, given its arguments by name."""
    words = [sys.executable, "-P", "-m", "rlhf.generators.servers.process"]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        elif value not in (None, {}):
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


# Servers of judges. The first process of a run that asks a model starts its server. An environment variable
# tells the processes that this one starts, such as an annotator, the address and the key.


_ASKED = "RLHF_JUDGES"  # environment variable: server -> [address, key], as JSON
_children: dict[str, Child] = {}  # the servers that this process has started
_lock = Lock()


def served(model: str, arguments: Mapping[str, Any], gpus: str | None, log: Path | None) -> tuple[str, str]:
    """Return address and key of the server of a model; start it unless it runs, and wait until it answers.

    Judges with the same model, arguments and GPUs share a server.

    Args:
        model: hub name or folder.
        arguments: further arguments of vLLM by name, such as {"max_model_len": 4096}.
        gpus: GPUs of the server, as in CUDA_VISIBLE_DEVICES; None: those of this process, or none.
        log: file for its output; None: the output of this process.

    Raises:
        UserError: it ended, or did not answer in time.
        Interrupted: a signal was received.
    """
    with _lock:
        name = json.dumps([model, arguments, gpus], sort_keys=True)
        known, child = json.loads(os.environ.get(_ASKED, "{}")), _children.get(name)
        if name in known and (child is None or (child.process is not None and not child.ended())):
            return known[name][0], known[name][1]
        if child is None:
            key = secrets.token_urlsafe()
            own = {"VLLM_API_KEY": key, "VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1"}
            own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
            words = program({"model": model, "host": "127.0.0.1", **arguments})
            child = _children[name] = Child(words, own, log, port=free_port())
            atexit.register(child.stop)
        else:
            child.stop()
        say(f"starting vLLM with {model}, which judges; it is usually ready after 1 to 5 minutes")
        url, key = f"{child.start()}/v1", child.environment["VLLM_API_KEY"]
        until = time.monotonic() + _START_S
        while not model_names(f"{url}/models", key):
            end_wait()
            if (how := child.ended()) or time.monotonic() > until:
                problem, output = how or f"it was not ready within {_START_S:g} s", child.output()
                child.stop()
                raise UserError(f"vLLM must serve the judge {model}, but {problem}; {output}")
            time.sleep(_POLL_S)
        os.environ[_ASKED] = json.dumps({**known, name: [url, key]})
        return url, key
