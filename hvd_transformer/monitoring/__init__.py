"""Is every rank moving, and what does it do now? No torch."""
