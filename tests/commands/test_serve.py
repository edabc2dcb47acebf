"""Tests of `rlhf.serve` and launchers/serve.sh, with a stand-in for the server of vLLM."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rlhf import serve
from rlhf.core.errors import UserError
from rlhf.generators.servers import server
from rlhf.words.compose import compose
from tests.tiny_models import tiny_config

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).with_name("stand_in_server.py")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """`call(*flags, during=...)` serves a tiny model; returns exit code, stdout and stderr.

    The function `during` runs in a thread beside the command.
    """
    tiny_config("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr("rlhf.generators.servers.server._WATCH_S", 0.02)
    monkeypatch.setattr("rlhf.generators.servers.server._PING_S", 0.04)
    monkeypatch.setattr("rlhf.generators.servers.server._POLL_S", 0.02)
    monkeypatch.setattr(serve, "command", lambda settings, host: [sys.executable, STAND_IN, tmp_path])
    monkeypatch.delenv(serve.KEY, raising=False)
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def answer(*flags: str, during: Callable[[], None] | None = None) -> tuple[int, str, str]:
        code: object = 0
        with ThreadPoolExecutor(1) as threads:
            beside = threads.submit(during or (lambda: None))
            try:
                serve.main([str(tmp_path / "model"), *flags])
            except SystemExit as stop:
                code = stop.code
        beside.result()
        said = capsys.readouterr()
        assert isinstance(code, int)
        return code, said.out, said.err

    yield answer
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def started(tmp_path):
    """`started(n)` waits until the n-th server has its address in the file `url`; returns its process."""

    def wait(number: int) -> psutil.Process:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            ids = (tmp_path / "started").read_text().split() if (tmp_path / "started").exists() else []
            if len(ids) >= number and (tmp_path / "url").exists():
                return psutil.Process(int(ids[number - 1]))
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the server did not start")

    return wait


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--host 0.0.0.0", "RLHF_KEY must be set for a server that listens beyond this machine"),
        ("--host node7", "got --host node7 without a key; run: export RLHF_KEY=<key>"),
        ("--key-variable OTHER", "got OTHER, which is not set; run: export OTHER=<key>"),
        ("--key-variable LINES", "contains others, such as a line break"),
        ("--memory 2", "--memory must be above 0 and at most 1 (a share), got 2.0"),
        ("--max-num-seqs 0", "--max-num-seqs must be >= 1"),
        ("--max-model-len 0", "--max-model-len must be >= 1"),
        ("--tensor-parallel-size 99", "--tensor-parallel-size must be 1 to "),
        ("--nccl", "--nccl must be left out on a machine without GPUs"),
        ("--port 70000", "--port must be a port"),
        ("--announce no/url", "--announce must be in a folder that exists, got no/url"),
    ],
)
def test_mistakes_end_the_command_before_a_server_starts(call, tmp_path, monkeypatch, flags, told):
    monkeypatch.setenv("LINES", "a\nb")
    code, _, err = call(*flags.split())
    assert code == 2 and told in err and not (tmp_path / "started").exists()


def test_a_folder_without_a_model_is_refused(call, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        serve.main(["no/such/model"])
    assert stop.value.code == 2 and "got 'no/such/model'" in capsys.readouterr().err


def test_vllm_and_the_plugin_of_this_project_must_be_installed(monkeypatch):
    command = server.command
    monkeypatch.setattr(server, "find_spec", lambda name: name)
    monkeypatch.setattr(server, "entry_points", lambda group, name: [])
    with pytest.raises(UserError, match="needs the plugin of this project for vLLM.* pip install -e"):
        command(settings=None, host="127.0.0.1")  # type: ignore[arg-type]
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs vLLM, which is not installed"):
        command(settings=None, host="127.0.0.1")  # type: ignore[arg-type]


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_is_started_again_after_a_kill_and_a_hang_and_ends_with_a_signal(
    call, started, tmp_path, monkeypatch, number
):
    """SIGUSR1, which SLURM sends to all processes before a time limit, does not end it."""
    monkeypatch.setenv("RLHF_KEY", "secret")
    seen = []

    def during():
        seen.append(started(1))
        url = (tmp_path / "url").read_text()
        seen[0].kill()
        seen.append(started(2))
        seen[1].suspend()
        seen.append(started(3))
        seen.append((url, (tmp_path / "url").read_text()))
        os.kill(os.getpid(), signal.SIGUSR1)
        seen[2].send_signal(signal.SIGUSR1)
        os.kill(os.getpid(), number)

    code, out, _ = call(
        "--port", "0", "--announce", str(tmp_path / "url"), "--answer-limit", "1", during=during
    )
    assert code == 0 and f"{number.name}: stopping the server" in out
    assert out.index("starting vLLM with ") < out.index("ready: ")
    (settings,) = {line.partition(" ... ")[2] for line in out.splitlines() if line.startswith("next: ")}
    cfg = compose(shlex.split(settings))
    assert cfg.generator.urls == [seen[3][0].strip()] and cfg.generator.key_variable == "RLHF_KEY"
    assert out.count("ready: http://127.0.0.1:") == 3 and "died (killed by SIGKILL); starting it again" in out
    assert "did not answer /v1/rlhf/status within 1 s; starting it again" in out
    *servers, (first, last) = seen
    assert first == last == f"{out.split('ready: ')[1].split()[0]}\n", "a run knows only the first address"
    assert not any(server.is_running() for server in servers)
    assert not (tmp_path / "url").exists() and not list((tmp_path / "tmp").iterdir())


@pytest.mark.process
def test_a_server_that_cannot_start_or_is_lost_too_often_ends_the_command(
    call, started, tmp_path, monkeypatch
):
    monkeypatch.setenv("RLHF_KEY", "secret")
    flags = ("--port", "0", "--announce", str(tmp_path / "url"), "--restarts", "1")

    def during():
        started(1).kill()
        started(2).kill()

    code, _, err = call(*flags, during=during)
    assert code == 1 and "at most 1 times (--restarts), but it died (killed by SIGKILL)" in err
    (tmp_path / "fail").touch()
    code, _, err = call(*flags)
    assert code == 1 and "the server must start, but it ended (exit code 1); its output is above" in err


@pytest.mark.process
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(call, started, tmp_path, monkeypatch):
    """As in a SLURM job, where the servers must live until the trainer has saved its checkpoint."""
    monkeypatch.setenv("RLHF_KEY", "secret")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def during():
        server = started(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        assert server.is_running()
        os.kill(os.getpid(), signal.SIGINT)

    assert call("--port", "0", "--announce", str(tmp_path / "url"), during=during)[0] == 0


@pytest.mark.process
def test_the_launcher_takes_the_key_from_a_file_that_only_its_owner_can_read(tmp_path):
    tool, key = tmp_path / "python", tmp_path / "key"
    tool.write_text('#!/bin/sh\necho "$RLHF_KEY:$*"\n')
    tool.chmod(0o755)
    key.write_text("secret\n")

    def launch(mode: int, **given: str) -> subprocess.CompletedProcess[str]:
        key.chmod(mode)
        words = [ROOT / "launchers" / "serve.sh", "model", "--port", "1"]
        own = {"PATH": os.environ["PATH"], "PYTHON": str(tool), **given}
        return subprocess.run(words, env=own, capture_output=True, text=True)

    for mode in (0o600, 0o400):
        assert launch(mode, KEY_FILE=str(key)).stdout == "secret:-m rlhf.serve model --port 1\n"
    assert launch(0o644, RLHF_KEY="other").stdout == "other:-m rlhf.serve model --port 1\n"
    for mode in (0o640, 0o604):
        refused = launch(mode, KEY_FILE=str(key))
        assert refused.returncode == 2 and f"run: chmod 600 {key}" in refused.stderr and not refused.stdout
    assert launch(0o600, KEY_FILE=str(tmp_path / "none")).returncode != 0
