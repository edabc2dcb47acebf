"""Rules over the whole config, checked before a run starts. Imports no torch."""
