"""Synchronous training on several machines, or with a copy of the variables per GPU."""
