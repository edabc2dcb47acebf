"""Processes of a run: data-parallel ranks, worker processes and their services, signal handling."""
