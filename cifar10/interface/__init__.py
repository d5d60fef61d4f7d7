"""The Python interface: `from cifar10 import Config, train, evaluate, Follower`."""
