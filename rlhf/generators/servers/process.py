"""The program of a server: vLLM's own, in a process that ends with the process that started it."""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from rlhf.generators.servers.protocol import PARENT, SCRATCH
from rlhf.processes.signals import kill_group

_POLL_S = 1.0  # between two looks at the parent


def end() -> None:
    """Kill all processes of this server, which are its process group, and remove their temporary files."""
    kill_group(os.getpgrp(), spared=os.getpid())
    folder = Path(tempfile.gettempdir())
    if folder.name.startswith(SCRATCH):
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_others() -> None:
    """End this server, in a thread, as soon as the process that started it or its own main process has ended.

    In a process that is part of no server, nothing happens.
    """
    if number := os.environ.get(PARENT):
        threading.Thread(target=_end_with, args=(int(number), os.getpgrp()), daemon=True).start()


def _end_with(*others: int) -> None:
    while all(map(_runs, others)):
        time.sleep(_POLL_S)
    end()


def _runs(process: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


if __name__ == "__main__":
    end_with_others()
    runpy.run_module("vllm.entrypoints.launchers.api_server.entry", run_name="__main__", alter_sys=True)
