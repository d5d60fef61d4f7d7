"""Trains, as `train_multi_gpu.py` does."""
