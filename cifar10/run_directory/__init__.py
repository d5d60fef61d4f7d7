"""The directory of a run: its files, checkpoints and locks."""
