"""Tasks: sources of prompts, reference responses and preference pairs, and tokenized batches."""
