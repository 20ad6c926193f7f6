"""Starts worker processes on this host; reads the environment variables of launchers (torchrun, MPI, SLURM)."""
