"""Command `python -m rlhf.serve <model> [flags]`: a server of vLLM for runs that name it in `generator.urls`.

The server samples nothing before a run has sent weights: of the model, only its config is read. A server that
ends or does not answer is started again. SIGTERM and Ctrl-C end it, with all its processes; a signal that is
ignored when the command starts stays ignored.

Exit codes: 0 after SIGTERM or Ctrl-C, else those of `rlhf.train`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.config.generators import INTERFACE, Transfer, VLLMServerConfig, token_problems
from rlhf.config.models import Dtype
from rlhf.config.root import set_environment
from rlhf.core.errors import RunError, UserError, setting
from rlhf.core.files import write_atomically
from rlhf.core.machine import is_loopback
from rlhf.generators.servers.server import Gone, Server, command, numbers, variables
from rlhf.generators.vllm.sampler import VLLMFactory
from rlhf.launch.command_line import stop
from rlhf.processes.servers import Child, free_port
from rlhf.terminal.console import prepare_output, say, say_loading

KEY = "RLHF_KEY"  # environment variable with the key, unless --key-variable names another one


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments`, by default those of the command line."""
    prepare_output()
    options = _parser().parse_args(arguments)
    set_environment()
    try:
        key = _key(options)
        say_loading()
        with suppress(asyncio.CancelledError):
            asyncio.run(_until_signal(options, key))
    except (UserError, RunError) as error:
        stop(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf.serve",
        description="Start a server of vLLM for runs with generator=vllm_server generator.urls=[<address>]. "
        "The runs send the weights. A server that ends or hangs is started again; SIGTERM and Ctrl-C end it.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    whole: dict[str, Any] = {"type": int, "metavar": "N"}
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    parser.add_argument("model", help="model.policy of the runs: hub name, or folder with its config.json")
    parser.add_argument("--host", default="127.0.0.1", help="address or name of the interface to listen on")
    parser.add_argument("--port", **whole, default=8000, help="port; 0 is a free one")
    add("--key-variable", metavar="NAME", help=f"environment variable with the key (default: {KEY}, if set)")
    add("--announce", type=Path, metavar="FILE", help="file that has the address while the server is ready")
    add("--max-model-len", **whole, help="tokens of prompt and response (default: the model's context)")
    parser.add_argument("--max-num-seqs", **whole, default=256, help="sequences decoded in parallel")
    dtypes = [each.value for each in Dtype]
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="model.dtype of the runs")
    parser.add_argument("--float32-head", action="store_true", help="as model.float32_head of the runs")
    add("--memory", type=float, metavar="SHARE", help="as generator.memory of a run")
    parser.add_argument("--tensor-parallel-size", **whole, default=1, help="GPUs that share the model")
    parser.add_argument("--nccl", action="store_true", help="runs have generator.transfer=nccl (GPUs only)")
    add("--enforce-eager", action=argparse.BooleanOptionalAction, help="do not compile (default: on CPUs)")
    add("--absent-ids", type=numbers, metavar="IDS", help="ids that no token has, as 7,50277-50303")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--restarts", **whole, default=10, help="times that the server is started again")
    parser.add_argument("--start-limit", type=float, default=1200, metavar="S", help="seconds to be ready")
    parser.add_argument(
        "--answer-limit", type=float, default=300, metavar="S", help="seconds to answer, also during a load"
    )
    return parser


def _key(options: Namespace) -> str | None:
    """Return the key of the server; None: it needs none.

    Raises:
        UserError: there is no key, but one was asked for, or other hosts reach the server.
    """
    variable = getattr(options, "key_variable", KEY)
    if key := os.environ.get(variable):
        if problem := next(token_problems("--key-variable", variable), None):
            raise UserError(problem)
        return key
    if "key_variable" in options:
        raise UserError(
            f"--key-variable must name an environment variable with the key (runs send it), got {variable}, "
            f"which is not set; run: export {variable}=<key>"
        )
    if not is_loopback(f"http://{options.host}"):
        raise UserError(
            f"{KEY} must be set for a server that listens beyond this machine (everybody could use it), got "
            f"--host {options.host} without a key; run: export {KEY}=<key>, or set --host 127.0.0.1"
        )
    return None


def _settings(options: Namespace) -> VLLMFactory:
    """Return the settings of the server.

    Raises:
        UserError: the model cannot be found, the host has too few GPUs, or another value is out of range.
    """
    import torch
    from transformers import AutoConfig

    from rlhf.models.folder import fetch
    from rlhf.models.headers import ModelFacts

    config = fetch(AutoConfig, options.model, "model", trust_remote_code=options.trust_remote_code)
    given, gpus = vars(options), torch.cuda.device_count()
    length = given.get("max_model_len", ModelFacts(config.to_dict()).context or 0)
    memory = given.get("memory", VLLMServerConfig.on_gpu if gpus else VLLMServerConfig.in_ram)
    tensor, announce = options.tensor_parallel_size, given.get("announce")
    for flag, value, fits, rule in (
        ("--max-model-len", length, length > 0, ">= 1 (tokens of a sequence)"),
        ("--max-num-seqs", options.max_num_seqs, options.max_num_seqs > 0, ">= 1 (it samples something)"),
        ("--memory", memory, 0 < memory <= 1, "above 0 and at most 1 (a share)"),
        ("--tensor-parallel-size", tensor, 1 <= tensor <= max(gpus, 1), f"1 to {max(gpus, 1)} (GPUs here)"),
        ("--nccl", True, gpus or not options.nccl, "left out on a machine without GPUs (weights are files)"),
        (
            "--nccl",
            "none",
            not options.nccl or is_loopback(f"http://{options.host}") or os.environ.get(INTERFACE),
            f"given with {INTERFACE}, the interface that other hosts reach",
        ),
        ("--announce", announce, not announce or announce.parent.is_dir(), "in a folder that exists"),
        ("--port", options.port, 0 <= options.port < 2**16, "a port (0 to 65535)"),
    ):
        if not fits:
            raise UserError(f"{flag} must be {rule}, got {value}; set {flag} to another value")
    same = ("model", "trust_remote_code", "dtype", "float32_head", "max_num_seqs", "tensor_parallel_size")
    return VLLMFactory(
        **{name: given[name] for name in same},
        max_model_len=length,
        memory=memory,
        enforce_eager=given.get("enforce_eager", not gpus),
        gpu=bool(gpus),
        absent_ids=given.get("absent_ids", ()),
        sleeps=False,
        in_flight=False,  # this and what follows is in the requests of a run
        transfer=(Transfer.nccl if options.nccl else Transfer.shared_memory).value,
        stop_ids=(),
        pad_id=0,
        seed=0,
    )


async def _until_signal(options: Namespace, key: str | None) -> None:
    """Start a server, and start it again whenever it ends or does not answer, until a signal comes.

    Raises:
        CancelledError: a signal came.
        UserError: see `_settings`.
        RunError: the server cannot start, or ended too often.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def end(number: signal.Signals) -> None:
        if not task.cancelling():
            say(f"{number.name}: stopping the server")
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, end, number)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # for the trainer, before the time limit of a job
        signal.signal(number, signal.SIG_IGN)
    settings = _settings(options)
    arguments, port = command(settings, options.host), options.port or free_port()
    child = Child(arguments, variables(settings, key), None, options.host, port)
    use = f"generator=vllm_server {setting('generator.urls', [_reachable(f'http://{options.host}:{port}')])}"
    if key:
        use += f" generator.key_variable={getattr(options, 'key_variable', KEY)}"
    say(f"starting vLLM with {options.model} in {options.dtype}; it is usually ready after 1 to 5 minutes")
    limits = options.start_limit, options.answer_limit, options.answer_limit
    server, announce = Server("the server", None, key, *limits, child), getattr(options, "announce", None)
    for left in reversed(range(options.restarts + 1)):
        try:
            await server.start()
            say(f"ready: {server.url}\nnext: python -m rlhf.train ... {use}")
            if announce is not None:
                write_atomically(announce, _reachable(str(server.url)) + "\n")
            await server.watch()
        except Gone as error:
            if not left:
                raise RunError(
                    f"the server may be started again at most {options.restarts} times (--restarts), but it "
                    f"{error}"
                ) from error
            say(f"the server {error}; starting it again")
        finally:
            if announce is not None:
                announce.unlink(missing_ok=True)
            await asyncio.shield(server.stop())


def _reachable(url: str) -> str:
    """Return an address with the name of this host in place of all its interfaces."""
    return url.replace("//0.0.0.0:", f"//{socket.gethostname()}:")


if __name__ == "__main__":
    main()
