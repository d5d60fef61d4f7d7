"""Training runs: assembly of data, model and towers, the loop, and its hooks."""
