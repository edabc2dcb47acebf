"""Trials before the first update: a run computes in a faster way if the results are right."""
