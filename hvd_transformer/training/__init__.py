"""Assembling a job, and the one loop for all tasks."""
