"""Data that flows between parts, and small tools. Imports no other folder of rlhf."""
