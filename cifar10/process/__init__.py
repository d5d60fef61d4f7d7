"""Starts and ends programs; handles their signals, output streams and files."""
