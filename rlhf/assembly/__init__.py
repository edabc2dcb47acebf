"""Construction of the parts of a run from the root config. Other folders get sections or finished parts."""
