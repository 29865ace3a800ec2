"""The launchers of the jobs, and the hosts that they run on."""
