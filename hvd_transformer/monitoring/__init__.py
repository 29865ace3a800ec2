"""Whether every rank makes progress, and what it is doing now. No torch."""
