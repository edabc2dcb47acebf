"""Experiments in reinforcement learning from human feedback, synchronous and asynchronous, in one loop."""

__version__ = "0.1.0"
