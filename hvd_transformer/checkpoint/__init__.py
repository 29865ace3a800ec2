"""Saves, verifies and restores checkpoints, in safetensors and JSON only: nothing is ever unpickled."""
