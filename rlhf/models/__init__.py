"""Models: loading and saving, modules that run Hugging Face models over rollouts, log-probs, LoRA."""
