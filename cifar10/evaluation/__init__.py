"""Scores the checkpoints of a run, every image exactly once."""
