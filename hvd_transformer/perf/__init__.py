"""What a configuration costs, found without training."""
