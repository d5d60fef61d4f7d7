"""The same step on several machines, and with variables on every GPU."""
