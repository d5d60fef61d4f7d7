"""Scores the checkpoints of a run, once, or whenever a new one is written."""
