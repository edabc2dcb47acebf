"""The training loop, rollout stream, metrics recorder, evaluators and checkpoints."""
