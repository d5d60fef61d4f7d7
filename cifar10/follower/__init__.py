"""The model of a run, filled from its checkpoints, once or as they come."""

from cifar10.follower.follower import Follower

__all__ = ["Follower"]
