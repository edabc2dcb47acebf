"""Stages of work: a training run, its prerequisites, its evaluation, relabelling of pairs, pipelines."""
