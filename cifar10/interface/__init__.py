"""What programs import: `from cifar10 import Config, train, evaluate, Follower`."""
