"""The commands of `python -m cifar10`, a folder each."""
