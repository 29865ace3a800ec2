"""Measurements. `python -m benchmarks.data_parallel`; a new one is a list of contestants for `benchmarks.paired`."""
