"""The model of a run, filled from its checkpoints, once or as they come."""
