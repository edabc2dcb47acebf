"""Learning objectives, one file per algorithm.

Their config sections are in `rlhf.config.algorithms`.
"""
