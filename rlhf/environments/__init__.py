"""Environments: programs that answer the replies of a model, so that an episode has several turns."""
