"""Learning objectives: one algorithm, one file. Their settings are in `config.py`, which imports no torch."""
