"""Job files for schedulers: a Slurm batch script, a Kubernetes MPIJob, a compose file."""
