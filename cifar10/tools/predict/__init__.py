"""Classifies images from files."""
