"""Generators, the sources of responses: a model that samples responses, or a data set that stores them."""
