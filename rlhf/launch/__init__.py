"""The command line: Hydra callback, sweeps, SLURM jobs."""
