"""The commands of `python -m cifar10`."""
