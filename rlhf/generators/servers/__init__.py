"""Servers of vLLM as generators, on this machine or on others."""
