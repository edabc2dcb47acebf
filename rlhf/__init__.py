"""A framework for RLHF experiments, with one training loop for synchronous and asynchronous runs."""

__version__ = "0.1.0"
