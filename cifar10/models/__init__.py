"""Architectures: one file each, returning a Keras model."""
