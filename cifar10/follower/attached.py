"""A live copy of the model of a training in the same process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from cifar10.follower.live_copy import LiveCopy, Network
from cifar10.input import records
from cifar10.towers.train_state import TrainState

_IMAGE_SHAPE = (records.HEIGHT, records.WIDTH, records.CHANNELS)


class AttachedCopy(LiveCopy):
    """A copy that takes a training's variables, from device to device.

    Args:
        state: What the training updates.
        settings: The content of its `config.json`.
        every: Steps from one copying to the next; the last step is always copied.
        device: Where the copy lives and computes.
        use_averages: Whether it takes the variables' moving averages, as an evaluation
            does, and not their last values.
    """

    def __init__(
        self,
        state: TrainState,
        settings: Mapping[str, Any],
        every: int = 1,
        device: str = "/cpu:0",
        *,
        use_averages: bool = True,
    ) -> None:
        super().__init__()
        if every < 1:
            raise ValueError(f"every {every}: it is at least 1 step.")
        self._state = state
        self._every = every
        self._max_steps = settings["max_steps"]
        self._last: int | None = None
        self._network = Network(
            state.model,
            settings["distortions"],
            _IMAGE_SHAPE,
            settings["class_names"],
            device,
        )
        self._trainable = (
            state.averages
            if use_averages
            else [one.value for one in state.model.trainable_variables]
        )

    def after_step(self, step: int) -> None:
        """Takes the variables if it is time; to be called between two updates.

        Args:
            step: Updates applied so far. After a rollback it may be less than before.
        """
        turn = step if step == self._max_steps else step // self._every
        # After a step that was not finite no update was applied: there is no such step.
        if turn == self._last or bool(self._state.halted):
            return
        self._last = turn
        began, since = time.perf_counter(), time.time()
        weights = self._network.weights(
            step,
            self._trainable,
            [one.value for one in self._state.model.non_trainable_variables],
        )
        self._swap(self._network, weights, since, began)
