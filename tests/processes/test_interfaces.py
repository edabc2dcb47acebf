"""Tests of the choice of network interfaces for ranks on one host and on several hosts."""

import os
import socket
from types import SimpleNamespace

import pytest

from rlhf.core import machine
from rlhf.core.errors import UserError
from rlhf.core.machine import choose_interfaces, interface_of, loopback, source_address

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def hosts(monkeypatch):
    """Simulate one of two hosts: `loop` has 127.0.0.1, `net0` has 10.0.0.2, `first` is the other host."""
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "unset")  # so that the variable is restored after the test
        monkeypatch.delenv(variable)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "first")
    addresses = {"loop": ["127.0.0.1", "::1"], "net0": ["10.0.0.2", "fe80::2%net0"]}
    found = {name: [SimpleNamespace(address=each) for each in many] for name, many in addresses.items()}
    monkeypatch.setattr(machine.psutil, "net_if_addrs", lambda: found)
    up = dict.fromkeys(addresses, SimpleNamespace(isup=True))
    monkeypatch.setattr(machine.psutil, "net_if_stats", lambda: up)
    routes = {"first": "10.0.0.2", "127.0.0.1": "127.0.0.1", "myself": "127.0.1.1"}
    monkeypatch.setattr(machine, "source_address", routes.__getitem__)


def chosen():
    return [os.environ.get(variable) for variable in VARIABLES]


@pytest.mark.parametrize(
    ("variables", "cuda", "interfaces"),
    [
        ({}, True, ["net0", "=net0"]),  # of the route to the first rank
        ({}, False, ["net0", None]),
        ({"LOCAL_WORLD_SIZE": "4"}, True, ["loop", None]),  # all ranks on one host
        ({"MASTER_ADDR": "127.0.0.1"}, False, ["loop", None]),  # several hosts simulated on one machine
        ({"GLOO_SOCKET_IFNAME": "ib0"}, True, ["ib0", "=net0"]),
        ({"GLOO_SOCKET_IFNAME": "ib0", "MASTER_ADDR": "myself"}, False, ["ib0", None]),
    ],
)
def test_ranks_use_the_interface_of_the_route_to_the_first_rank(variables, cuda, interfaces, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    choose_interfaces(cuda=cuda)
    assert chosen() == interfaces


def test_a_name_that_is_a_loopback_address_on_its_own_host_is_refused(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "myself")
    with pytest.raises(UserError, match=r"got myself \(here it is 127.0.1.1\)") as error:
        choose_interfaces(cuda=True)
    remedy = "export GLOO_SOCKET_IFNAME=<interface> NCCL_SOCKET_IFNAME=<interface>"
    assert remedy in str(error.value) and str(error.value).endswith("interfaces: net0")
    assert chosen() == [None, None]


def test_an_unknown_host_of_the_first_rank_is_refused(monkeypatch):
    def unknown(host):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(machine, "source_address", unknown)
    with pytest.raises(UserError, match=r"got first \(Name or service not known\)"):
        choose_interfaces(cuda=False)


def test_an_address_with_a_zone_belongs_to_its_interface():
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert (interface_of("fe80::2"), interface_of("10.9.9.9"), loopback()) == ("net0", None, "loop")
