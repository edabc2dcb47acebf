"""A study whose command, workers and attempts are killed at random has the rows of an undisturbed one."""

import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rlhf.study.file import read_spec
from rlhf.study.rows import read_rows

STUDY = """\
study: killed
set: [task=arithmetic, model=pythia, debug=tiny, schedule.total_episodes=640, schedule.save_every=4,
  cache_dir={cache}]
methods: {{dpo: [algo=dpo], rloo: [algo=rloo]}}
seeds: 4
"""
KILLS = int(os.environ.get("KILLS", "6"))
TIMES = ("cpu_s", "gpu_s", "memory_gb", "versions")


def rows(folder, cache, kills):
    """Return the rows of a study, by run; after each kill of a random process, the command starts again."""
    folder.mkdir()
    file = folder / "killed.yaml"
    file.write_text(STUDY.format(cache=cache))
    order = random.Random(1)
    log = (folder / "log").open("w")
    command = [sys.executable, "-m", "rlhf.study", "run", file, "--workers", "2"]
    while True:
        running = subprocess.Popen(command, stdout=log, stderr=log)
        while kills and running.poll() is None:
            time.sleep(0.2)
            try:
                processes = [p := psutil.Process(running.pid), *p.children(recursive=True)]
                if len(processes) < 4:  # the command, two workers, and at least one attempt
                    continue
                time.sleep(order.uniform(0, 5))
                os.kill((victim := order.choice(processes)).pid, signal.SIGKILL)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
            place = processes.index(victim)
            print(f"killed {'the command' if not place else victim.pid}", file=log, flush=True)
            kills -= 1
        if running.wait() == 0:
            break
    found = read_rows(read_spec(file).rows)
    return {row.run: {k: v for k, v in vars(row).items() if k not in TIMES} for row in found}


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.timeout(1800)
def test_kills_change_no_row(tmp_path):
    expected = rows(tmp_path / "calm", tmp_path / "cache", kills=0)
    assert len(expected) == 8
    assert rows(tmp_path / "killed", tmp_path / "cache", kills=KILLS) == expected
