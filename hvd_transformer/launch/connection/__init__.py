"""One ssh to each host of a job, kept across its restarts."""
