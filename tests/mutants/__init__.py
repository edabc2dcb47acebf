"""Change one line of the package at a time, and report whether fast tests notice: see `__main__`."""
