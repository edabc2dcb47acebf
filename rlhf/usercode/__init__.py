"""The user's own Python: found by its address, given as an object, and run with protection."""
