"""Data structures of the training loop, and small utilities. This package imports no other folder of rlhf."""
