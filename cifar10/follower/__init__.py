"""Loads the model of a run from one checkpoint, or from each new checkpoint."""

from cifar10.follower.live_copy import Follower

__all__ = ["Follower"]
