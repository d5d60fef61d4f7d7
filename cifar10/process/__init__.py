"""Starts and ends programs; handles their signals and output streams."""
