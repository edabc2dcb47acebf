"""The memory plan: an estimate of the memory that a run needs, from its config alone.

This package imports no torch.
"""
