"""Learning objectives, one file per algorithm.

Their config sections are in `rlhf.config.algo`, `rlhf.config.policy_gradient` and `rlhf.config.off_policy`.
"""
