"""One adapter for each trainer, which translates the contract's jobs for it.

Each is a program, `adapters/ours.py JOB.json`, with this repository in PYTHONPATH.
"""
