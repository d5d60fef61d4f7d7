"""Loads the model of a run from a checkpoint, once or for each new one."""

from cifar10.follower.live_copy import Follower

__all__ = ["Follower"]
