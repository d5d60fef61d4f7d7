"""Scores the checkpoints of a run, as `eval.py` does."""
