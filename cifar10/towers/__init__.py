"""The synchronous step: towers, the average of the gradients, one update."""
