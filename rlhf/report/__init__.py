"""Report of run folders: an HTML page, PNG figures and a table (`python -m rlhf.report <folders...>`).

This package imports no torch.
"""
