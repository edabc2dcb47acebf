"""Texts for language models that judge, one for each kind of question."""
