"""Finds data sets, and makes batches of them for training and evaluation."""
