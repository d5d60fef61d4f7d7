"""Exports the model of a run for other programs."""
