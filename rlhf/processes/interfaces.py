"""Network interfaces through which the ranks of a run communicate. This module imports no torch."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from rlhf.core.errors import UserError
from rlhf.core.launched import local_world_size, world_size
from rlhf.core.network import is_loopback

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
    raise UserError(
        f"MASTER_ADDR must be a host that all hosts of the run reach (the ranks connect over the network), "
        f"got {host} ({reason}); correct it, or export {remedy} with one of this host's interfaces: "
        f"{', '.join(_external()) or 'none is up'}"
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
    return next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(each.address.partition("%")[0] == address for each in addresses)
        ),
        None,
    )


def loopback() -> str:
    """Return the name of the loopback network interface."""
    return interface_of("127.0.0.1") or "lo"


def _external() -> list[str]:
    """Return the network interfaces of this machine that are up, except the loopback interface."""
    return [name for name, state in psutil.net_if_stats().items() if state.isup and name != loopback()]
