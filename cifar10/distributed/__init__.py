"""Synchronous training on several machines, or with variables on every GPU."""
