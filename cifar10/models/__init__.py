"""Built-in architectures, and functions that find, build and check models."""
