"""Scorers of responses: reward models, programs, functions, services, labels, and weighted sums."""
