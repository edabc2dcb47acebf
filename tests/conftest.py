"""What holds for every test. The environment is set before anything imports torch."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel, one core each
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_TOKEN_PATH", os.devnull)  # no login
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.fsync = lambda file: None  # a tiny run would wait for the disk 50 times; no test switches the machine off

pytest_plugins = ["tests.command_line", "tests.compositions", "tests.session"]
