"""What a run shows and leaves behind: progress, metrics, charts, report. No torch."""
