"""Engines: other schedulers to which the service sends jobs, and where it follows them."""
