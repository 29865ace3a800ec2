"""The gradient engine: from a weight's gradient to its update."""
