"""Measures this machine: allreduce, training, checkpoints, data."""
