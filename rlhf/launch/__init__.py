"""The command line: arguments and exit codes, checks before a run, sweeps, and SLURM jobs."""
