"""A run's folder on disk: file layout, resuming, environment record, log files."""
