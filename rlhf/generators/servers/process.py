"""The program of a server: vLLM's own, in a process that ends with the process that started it.

Also what a run and its servers agree on. This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import runpy

from rlhf.core.machine import STATUS as STATUS
from rlhf.processes.signals import end_with_others

LOAD = "/v1/rlhf/load"
GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"

if __name__ == "__main__":
    end_with_others()
    runpy.run_module("vllm.entrypoints.launchers.api_server.entry", run_name="__main__", alter_sys=True)
