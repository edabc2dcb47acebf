"""Rules over the whole config, checked before a run starts. This package imports no torch."""
