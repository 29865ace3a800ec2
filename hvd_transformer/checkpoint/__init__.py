"""Saves, verifies and restores checkpoints, in safetensors and text files only: nothing is ever unpickled."""
