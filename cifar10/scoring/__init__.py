"""Scores a model on images: what an evaluation and a training that validates share."""
