"""What a run and its servers agree on. This module imports neither torch nor vLLM."""

from rlhf.core.machine import STATUS as STATUS

LOAD = "/v1/rlhf/load"
GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
FILES, NCCL = "rlhf_files", "rlhf_nccl"  # vLLM's names of the ways in which weights come
PARENT = "RLHF_PARENT"  # environment variable: the process with which a server ends
SCRATCH = "rlhf-server-"  # begin of the name of a server's own folder for temporary files
