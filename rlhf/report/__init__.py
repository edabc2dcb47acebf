"""A page, pictures and a table of run folders: `python -m rlhf.report <folders...>`. Imports no torch."""
