"""The synchronous step: towers, the average of their gradients, one update."""
