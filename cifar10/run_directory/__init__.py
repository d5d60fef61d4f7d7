"""What is in the directory of a run, and how it survives what may happen to it."""
