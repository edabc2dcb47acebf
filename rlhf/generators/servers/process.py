"""The program of a server: vLLM's own, in a process that ends with the process that started it."""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

from rlhf.generators.servers.protocol import PARENT, SCRATCH
from rlhf.processes.groups import kill_group

_POLL_S = 1.0  # between two looks at the parent


def end() -> None:
    """Kill all processes of this server, which are its process group, and remove their temporary files."""
    kill_group(os.getpgrp(), spared=os.getpid())
    folder = Path(tempfile.gettempdir())
    if folder.name.startswith(SCRATCH):
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    end()


if __name__ == "__main__":
    if number := os.environ.get(PARENT):
        threading.Thread(target=_end_with, args=(int(number),), daemon=True).start()
    runpy.run_module("vllm.entrypoints.launchers.api_server.entry", run_name="__main__", alter_sys=True)
