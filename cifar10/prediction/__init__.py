"""Predictions for files and over HTTP."""
