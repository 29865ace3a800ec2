"""The same job as a file for a scheduler: a Slurm script, a Kubernetes MPIJob, a compose file."""
