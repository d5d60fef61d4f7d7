"""Says what is on images."""
