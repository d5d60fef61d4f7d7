"""`python -m cifar10 data`: what a data set consists of, before training on it."""
