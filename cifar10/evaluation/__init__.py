"""Scores the checkpoints of a run, once or as they are written."""
