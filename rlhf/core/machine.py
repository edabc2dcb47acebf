"""This machine: memory, GPUs, network, the hub's cache, the heap. This module imports no torch."""

from __future__ import annotations

import ctypes
import importlib.util
import ipaddress
import os
import platform
import re
import socket
import subprocess
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import psutil

from rlhf.core.errors import UserError
from rlhf.core.launched import local_world_size, world_size

# Memory of this machine: RAM (or the limit of its container) and GPUs.


_CGROUPS = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory.limit_in_bytes")  # files with the memory limit of a group: cgroups v2, v1
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_TIMEOUT_S = 5.0  # time limit of nvidia-smi


@dataclass(frozen=True, slots=True)
class Machine:
    """The memory of a machine, in bytes."""

    ram: int
    gpus: tuple[int, ...] = ()  # memory of each GPU that torch sees, in torch's order


@cache
def this_machine() -> Machine:
    """Return the memory that a run on this machine may use."""
    limits = [psutil.virtual_memory().total, *cgroup_limits(Path("/proc/self/cgroup"), _CGROUPS)]
    return Machine(min(limits), gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) if torch_has_cuda() else ())


def cgroup_limits(membership: Path, root: Path) -> list[int]:
    """Return the memory limits in bytes of this process's control groups and of all their parents.

    A container or SLURM sets such limits.

    Args:
        membership: file that lists the groups of a process, with lines `<number>:<controllers>:<path>`.
        root: folder of all control groups: files of v2 are below `root`, files of v1 below `root`/memory.
    """
    limits = []
    for line in _read_lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            for name in _LIMITS:
                limits += [int(text) for text in _read_lines(folder / name) if text.isdigit()]
            if folder == top:
                break
    return [limit for limit in limits if limit > 0]


def _read_lines(file: Path) -> list[str]:
    """Return the lines of a file; return [] if the file cannot be read."""
    try:
        return file.read_text().split("\n")[:-1]
    except OSError:
        return []


def torch_has_cuda() -> bool:
    """Return whether the installed torch was built for CUDA, according to torch/version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = "\n".join(_read_lines(Path(spec.origin).with_name("version.py")))
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.M) is not None


def gpus(visible: str | None) -> tuple[int, ...]:
    """Return the memory in bytes of each NVIDIA GPU.

    Args:
        visible: the value of CUDA_VISIBLE_DEVICES, which selects GPUs by index or UUID; None: all GPUs.

    Returns:
        An empty tuple if nvidia-smi is missing, fails or takes longer than 5 seconds: the memory is unknown.
    """
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line]
        sizes = [(index, uuid, int(float(mib) * 2**20)) for index, uuid, mib in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
    if visible is None:
        return tuple(size for _, _, size in sizes)
    selected = []
    for name in map(str.strip, visible.split(",")):
        matching = [size for index, uuid, size in sizes if name and (index == name or uuid.startswith(name))]
        # Like CUDA, ignore an entry that matches no single GPU, and all later entries.
        if len(matching) != 1:
            break
        selected.append(matching[0])
    return tuple(selected)


# Assignment of the GPUs of a host to the processes of a run.


def worker_gpu(number: int, gpus: int, ranks: int, rank: int, reserved: Collection[int] = ()) -> int:
    """Return the index of the GPU of a worker process, for example a generator process or an annotator.

    The ranks use the first GPUs. Worker processes use the other GPUs in turn, starting with the last one. If
    there is no other GPU, a worker process shares the GPU of the rank that starts it.

    Args:
        number: number of the process among the worker processes of the host, from 0.
        gpus: number of GPUs that the processes of the host see.
        ranks: number of ranks on the host.
        rank: rank on the host of the process that starts the worker process.
        reserved: GPUs that the process must not use, besides those of the ranks.
    """
    free = [gpu for gpu in range(ranks, gpus) if gpu not in reserved]
    return free[-1 - number % len(free)] if free else min(rank, gpus - 1)


# Network interfaces through which the ranks of a run communicate.


_PORT = 9  # any port: nothing is sent


def choose_interfaces(cuda: bool) -> None:
    """Set GLOO_SOCKET_IFNAME, and with several hosts and CUDA NCCL_SOCKET_IFNAME, unless they are set.

    If all ranks are on this host, gloo uses the loopback interface. Otherwise the interface is that of the
    route to MASTER_ADDR. On the host of MASTER_ADDR the interface is the one that has this address.

    NCCL reads a name as a prefix (eth1 also selects eth10), so its variable begins with `=`: this name only.

    Args:
        cuda: whether the ranks also communicate by NCCL.

    Raises:
        UserError: the ranks are on several hosts, and this host has no usable route to MASTER_ADDR.
    """
    if local_world_size() == world_size():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
        return
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if cuda else ("GLOO_SOCKET_IFNAME",)
    if unset := [variable for variable in variables if not os.environ.get(variable)]:
        interface = _interface_to(os.environ.get("MASTER_ADDR", ""), unset)
        for variable in unset:
            os.environ[variable] = f"={interface}" if variable.startswith("NCCL") else interface


def _interface_to(host: str, variables: list[str]) -> str:
    """Return the network interface of the route from this machine to another host.

    Args:
        host: name or address of the host.
        variables: the environment variables that the message of an error recommends.

    Raises:
        UserError: the host is unknown, there is no route, or the name of the host is a loopback address here.
    """
    try:
        own = source_address(host)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    else:
        interface = interface_of(own)
        # A loopback address in MASTER_ADDR itself is deliberate: hosts that are simulated on one machine.
        if interface and (not ipaddress.ip_address(own).is_loopback or is_loopback(f"http://{host}")):
            return interface
        reason = f"here it is {own}"
    remedy = " ".join(f"{variable}=<interface>" for variable in variables)
    interfaces = psutil.net_if_stats().items()
    others = [name for name, state in interfaces if state.isup and name != loopback()]
    raise UserError(
        f"MASTER_ADDR must be a host that all hosts of the run reach (the ranks connect over the network), "
        f"got {host} ({reason}); correct it, or export {remedy} with one of this host's interfaces: "
        f"{', '.join(others) or 'none is up'}"
    )


def source_address(host: str) -> str:
    """Return the address of this machine from which packets to a host are sent; nothing is sent.

    Raises:
        OSError: the name of the host is unknown, or there is no route to the host.
        UnicodeError: the name of the host is too long.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # UDP: only chooses the route
        return str(probe.getsockname()[0]).partition("%")[0]


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has an address; None if no interface has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return None


def loopback() -> str:
    """Return the name of the loopback network interface."""
    return interface_of("127.0.0.1") or "lo"


# Whether a service can be reached.


_CONNECT_S = 3.0  # seconds after which a connection counts as slow, not as refused
STATUS = "/v1/rlhf/status"  # route of the servers of `rlhf.serve` that answers with their state


def refusal(url: str) -> str | None:
    """Return the system's error message if the host of a URL refuses connections, or does not exist.

    The result is None if a connection is accepted, if it takes more than `_CONNECT_S`, or if a proxy is used,
    which makes the connection. Nothing is sent.

    Args:
        url: a valid address that begins with http:// or https://.
    """
    parsed = urlsplit(url)
    host, port = parsed.hostname or "", parsed.port or (443 if parsed.scheme == "https" else 80)
    if _behind_proxy(url):
        return None

    def connect() -> str | None:
        try:
            with suppress(TimeoutError):
                socket.create_connection((host, port), _CONNECT_S).close()
        except (OSError, UnicodeError) as error:  # UnicodeError: the name of the host is too long
            return getattr(error, "strerror", None) or str(error)
        return None

    return _within(_CONNECT_S, connect, late=None)


def _within(seconds: float, ask: Callable[[], str | None], late: str | None) -> str | None:
    """Return what `ask` returns, or `late` if it takes longer.

    A look-up of a name has no time limit, and no signal interrupts it, so another thread waits for it.
    """
    found: SimpleQueue[str | None] = SimpleQueue()
    Thread(target=lambda: found.put(ask()), daemon=True).start()
    with suppress(Empty):
        return found.get(timeout=seconds)
    return late


def refused_key(url: str, key: str | None, body: Any = None) -> int | None:
    """Return the HTTP status with which a service refuses a key, 401 or 403; None: any other answer.

    The result is None as well without an answer within `_CONNECT_S`, and if a proxy is used.

    Args:
        url: the address.
        key: the key; None: no key is sent.
        body: the body of a POST in JSON; None: the request is a GET.
    """
    import requests

    if _behind_proxy(url):
        return None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with requests.Session() as session, suppress(requests.RequestException, ValueError):
        session.trust_env, session.stream = False, True  # ~/.netrc would replace the key
        ask = partial(session.get, url) if body is None else partial(session.post, url, json=body)
        status = ask(headers=headers, timeout=_CONNECT_S, allow_redirects=False).status_code
        return status if status in (401, 403) else None
    return None


def model_names(url: str, key: str | None) -> list[str]:
    """Return the names of the models that an OpenAI-compatible server lists at a URL; [] if unknown."""
    import requests

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with suppress(requests.RequestException, ValueError, LookupError, TypeError):
        # With `auth`, ~/.netrc does not replace the key.
        found = requests.get(url, headers=headers, auth=lambda ask: ask, timeout=_CONNECT_S).json()["data"]
        return [str(each["id"]) for each in found]
    return []


def _behind_proxy(url: str) -> bool:
    """Return whether the proxy variables of the environment apply to the host of a URL."""
    from urllib.request import getproxies, proxy_bypass

    parsed, proxies = urlsplit(url), getproxies()
    applies = (parsed.scheme in proxies or "all" in proxies) and not is_loopback(url)
    return applies and not proxy_bypass(parsed.hostname or "")


def is_loopback(url: str) -> bool:
    """Return True if the host of a URL is localhost or a loopback address."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# The Hugging Face hub: models in its cache on this machine, and whether it can be reached. No torch.


_HUB_TIMEOUT_S = 4.0  # the longest time for one answer of the hub


def cached_folder(name: str) -> Path | None:
    """Return the folder of the model `name` in the hub's cache; None if it was not downloaded."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


@cache
def tokenizer_folder(name: str) -> Path | None:
    """Return the folder with the tokenizer of the model `name`, downloaded if possible; None: none found."""
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # several kinds; the run reports them when it loads the tokenizer
        return Path(snapshot_download(name, allow_patterns=["token*", "chat*", "special*", "config.json"]))
    return None


def unreachable() -> str | None:
    """Return why nothing can be downloaded from the hub, or None if the hub answers.

    The result comes within about `_TIMEOUT_S` seconds; the hub's own client tries for about a minute.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE=1 is set"
    address = constants.ENDPOINT

    def ask() -> str | None:
        import requests

        try:
            requests.head(address, timeout=_HUB_TIMEOUT_S)  # any HTTP status is an answer
        except requests.RequestException as error:
            return f"no connection to {address} ({type(error).__name__})"
        return None

    late = f"no connection to {address} within {_HUB_TIMEOUT_S:g} s"
    return _within(_HUB_TIMEOUT_S + 1, ask, late)


# Settings of the C library's heap, from which CPU tensors are allocated.


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # man 3 mallopt

_KEPT = 2**27  # bytes of free memory at the end of the heap that are not returned to the kernel
_MAPPED = 2**25  # bytes: memory of larger tensors is returned to the kernel at once; maximum of glibc


def keep_freed() -> None:
    """Configure glibc to keep freed memory for later tensors.

    By default glibc returns the end of the heap to the kernel as soon as some tens of MiB are free. The
    temporary tensors of every step are in this part of the heap, and the kernel clears each page when it is
    allocated again. This took 1.2 of 9.5 CPU-seconds of an update with a vocabulary of 50,304 tokens.

    The function does nothing with another C library, or if the user configures malloc with the environment
    variables `MALLOC_...` or `GLIBC_TUNABLES`.
    """
    configured = any(name.startswith("MALLOC_") for name in os.environ)
    configured = configured or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if configured or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, _MAPPED)
    libc.mallopt(TRIM_THRESHOLD, _KEPT)
