"""How the work of one model is cut over ranks and devices. Knows tensors and parameters, never models."""
