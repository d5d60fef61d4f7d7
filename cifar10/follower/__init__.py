"""Loads the model of a run from its checkpoints, once or as they are written."""

from cifar10.follower.live_copy import Follower

__all__ = ["Follower"]
