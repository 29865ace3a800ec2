"""Estimates what a configuration costs, and partitions its model into pipeline stages."""
