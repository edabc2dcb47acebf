"""The training loop and its collaborators: stream, recorder, evaluators, checkpoints."""
