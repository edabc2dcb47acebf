"""Where prompts, reference responses and preference pairs come from."""
