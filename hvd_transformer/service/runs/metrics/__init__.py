"""Curves of metrics.jsonl at any zoom."""
