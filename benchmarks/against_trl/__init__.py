"""Benchmark of this project against TRL on the same work: python -m benchmarks.against_trl.bench --help."""
