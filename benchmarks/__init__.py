"""Side-by-side measurements of `cifar10` against its peers."""
