"""The training service: a queue of jobs over hosts, and a tracker of runs. Never imports torch."""
