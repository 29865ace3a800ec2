"""What a configuration costs, and where to cut its model into pipeline stages."""
