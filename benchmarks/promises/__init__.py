"""The promises of this package as a contract that other trainers can run too.

`contract.py` has the promises. It knows a trainer by a command alone: an adapter, a
program that reads one job (`adapters/protocol.py`) and needs nothing of this package.
"""
