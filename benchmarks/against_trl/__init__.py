"""This project and TRL in turn on the same work: python -m benchmarks.against_trl.bench --help."""
