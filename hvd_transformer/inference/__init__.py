"""Using what was trained: decoding step by step, and the models of checkpoints."""
