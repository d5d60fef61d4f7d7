"""The commands of `python -m cifar10`: one module each."""
