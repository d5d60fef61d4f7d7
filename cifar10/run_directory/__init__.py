"""The directory of a run: its checkpoints, logs and lock."""
