"""Sampling with a Hugging Face model."""
