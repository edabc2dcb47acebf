"""Processes: data-parallel ranks, worker processes, services in them, signals."""
