"""Tests of what a run checks of its servers on the machine on which it starts."""

import socket

import pytest

from rlhf.config.generators import INTERFACE, Transfer, VLLMServerConfig
from rlhf.core import machine


@pytest.mark.parametrize(
    ("host", "interface", "told"), [("127.0.0.1", None, 0), ("0.0.0.0", None, 1), ("0.0.0.0", "eth0", 0)]
)
@pytest.mark.parametrize("transfer", [Transfer.nccl, Transfer.auto])
def test_weights_by_nccl_from_other_hosts_need_the_interface(host, interface, told, transfer, monkeypatch):
    """Where this is missing, NCCL would use the loopback interface, and wait."""
    monkeypatch.delenv(INTERFACE, raising=False)
    monkeypatch.setattr(machine, "_CONNECT_S", 0.1)  # the server answers nothing
    if interface:
        monkeypatch.setenv(INTERFACE, interface)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://{host}:{server.getsockname()[1]}"
        found = list(VLLMServerConfig(urls=[url], transfer=transfer).job_problems("generator"))
    assert len(found) == (told if transfer is Transfer.nccl else 0)
    assert all(text.endswith(f"run: export {INTERFACE}=<interface>") for text in found)
