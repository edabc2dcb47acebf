"""Data structures of the training loop, and small utilities. Imports no other folder of rlhf."""
