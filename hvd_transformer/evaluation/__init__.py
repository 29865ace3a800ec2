"""Metrics as sums over every sample, reduced once."""
