"""What holds for every test. The environment is set before anything imports torch."""

from __future__ import annotations

import importlib.util
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel, one core each
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_TOKEN_PATH", os.devnull)  # no login
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
if not os.path.exists("/dev/nvidiactl"):  # without a GPU, Triton interprets its kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.fsync = lambda file: None  # a tiny run would wait for the disk 50 times; no test switches the machine off

pytest_plugins = ["tests.command_line", "tests.compositions", "tests.session"]

STARTS = ("process", "run", "system", "gpu")
find_spec = importlib.util.find_spec


@pytest.fixture(autouse=True)
def vllm_looks_installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test that starts nothing compose configs of vLLM where vLLM is not installed."""
    if find_spec("vllm") is None and not any(map(request.node.get_closest_marker, STARTS)):
        shown = {"vllm": find_spec("rlhf")}
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: shown.get(name) or find_spec(name))
