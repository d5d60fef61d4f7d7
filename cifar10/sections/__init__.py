"""Sectioned towers: less memory for more time."""
