"""What the service shows of run directories: which there are, their curves, their logs, what their ranks do."""
