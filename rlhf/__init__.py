"""A framework for RLHF experiments, with one training loop for synchronous and asynchronous runs."""

from rlhf.core import early_signals

__version__ = "0.1.0"

early_signals.handle()
