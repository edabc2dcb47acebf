"""PyTorch modules around Hugging Face models: policy, reward model, value model, log-probs, LoRA."""
