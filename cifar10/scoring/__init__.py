"""Scores a model on images: shared by evaluations and trainings that validate."""
