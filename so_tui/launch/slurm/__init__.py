"""Runs as jobs of Slurm: a batch script, its submission, and what the queue says of it."""
