"""What runs on every host of a job: the probe, which becomes the node agent, the parent of the ranks there."""
