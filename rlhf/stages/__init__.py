"""A training run, and the work around it: prerequisites, evaluation, relabelling, pipelines."""
