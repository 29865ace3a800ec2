"""Data sources, tokenizers, token files and batches, and the order of samples. Rank and size are arguments."""
