"""The side of the commands: where the service is, and what it or its database tells."""
