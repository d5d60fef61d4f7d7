"""Predicts how training scales; `python -m benchmarks.scaling` puts it together."""
