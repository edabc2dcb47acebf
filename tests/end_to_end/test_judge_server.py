"""Faults of a real server of vLLM that judges: wrong key, garbage, a hang, a kill, and a killed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rlhf.core.errors import UserError
from rlhf.runs.folder import RunFolder
from rlhf.scorers.judge import answers_in
from rlhf.stages.run import run
from rlhf.words.compose import run_name
from tests import needs
from tests.end_to_end.conftest import wait_for
from tests.end_to_end.test_judge import serve

RUN = ["scorer=judge", "scorer.model=tiny", "scorer.answer=choice", "schedule.total_episodes=256",
       "schedule.save_every=1", "scorer.token_variable=JUDGE_KEY"]  # fmt: skip


def updates(folder: RunFolder) -> int:
    """Return the number of updates that the file of metrics has."""
    return len(folder.metrics.read_text().splitlines()) if folder.metrics.exists() else 0


@pytest.mark.nightly
def test_faults_of_a_real_server_are_named_and_bounded(command, tiny, tmp_path, monkeypatch):
    pytest.importorskip("vllm", reason=needs.VLLM)
    monkeypatch.setenv("VLLM_API_KEY", "right")
    monkeypatch.setenv("JUDGE_KEY", "wrong")
    with serve(tmp_path / "judge") as url:
        server = next(
            each for each in psutil.Process().children() if str(tmp_path / "judge") in each.cmdline()
        )
        words = [*RUN, f"scorer.url={url}"]
        with pytest.raises(UserError, match=r"scorer.token_variable"):
            run(tiny(*words), RunFolder(tmp_path / "key"))
        monkeypatch.setenv("JUDGE_KEY", "right")
        with pytest.raises(UserError, match="cannot be read"):
            run(tiny(*words, "scorer.answer=text", "scorer.max_tokens=16"), RunFolder(tmp_path / "garbage"))

        folder = RunFolder(tmp_path / run_name(tiny(*words)))
        program = [sys.executable, "-m", "rlhf.train", *command, *words]
        process = subprocess.Popen(program)
        wait_for(lambda: updates(folder) >= 2, process)
        os.killpg(server.pid, signal.SIGSTOP)
        time.sleep(3)
        rows = updates(folder)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(60) == os.EX_TEMPFAIL and time.monotonic() - began < 20
        assert updates(folder) == rows, "nothing was scored while the server hung"
        os.killpg(server.pid, signal.SIGCONT)

        process = subprocess.Popen(program)
        wait_for(lambda: updates(folder) >= rows + 2, process)
        process.kill()
        process.wait()
        short = ["scorer.timeout_s=5", "scorer.retries=1"]
        process = subprocess.Popen([*program, *short], stderr=subprocess.PIPE, text=True)
        wait_for(lambda: updates(folder) >= rows + 4, process)
        os.killpg(server.pid, signal.SIGKILL)
        began, said = time.monotonic(), process.communicate(timeout=100)[1]
        assert process.returncode == 1 and f"scorer.url={url}" in said and time.monotonic() - began < 60
        keys = [row["key"] for row in answers_in(folder.path / "judgements" / "scorer.jsonl")]
        assert len({*keys}) == len(keys), "a known answer was asked for"
        last = [json.loads(line) for line in folder.metrics.read_text().splitlines()][-1]
        assert not folder.finished() and last["judge/unreadable"] == 0
