"""Experiment trackers (Weights & Biases, MLflow, Trackio), each in a process of its own beside rank 0."""
