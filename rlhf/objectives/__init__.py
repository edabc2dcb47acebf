"""Learning objectives, one file per algorithm.

Their config sections are in `rlhf.config.algorithms`, `rlhf.config.algorithms` and `rlhf.config.algorithms`.
"""
