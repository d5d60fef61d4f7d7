"""One adapter for each trainer, which trains as the trainer's own documents recommend.

Each is a program of its own: `python benchmarks/promises/adapters/ours.py JOB.json`.
"""
