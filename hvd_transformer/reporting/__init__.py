"""What a run shows and leaves behind. No torch."""
