"""The memory plan: how much memory a run needs, from its config alone. Imports no torch."""
