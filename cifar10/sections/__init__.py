"""Sectioned towers, which need less memory and more time."""
