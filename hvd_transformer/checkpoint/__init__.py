"""Atomic save, load and retention. safetensors and JSON only: nothing is ever unpickled."""
