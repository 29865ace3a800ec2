"""Corpora, tokenizers, token files, and the order in which samples are seen. Rank and size are arguments."""
