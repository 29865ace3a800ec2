"""Sweeps over settings: which trials there are, which of them go on, and what came out."""
