"""Plain single-device models, each an ordered list of layers."""
