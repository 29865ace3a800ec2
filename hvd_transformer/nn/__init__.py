"""Building blocks that know tensor parallelism and where the gradients of their weights go."""
