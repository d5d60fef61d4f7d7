"""A live copy of the model of a training in the same process."""

import time
from collections.abc import Mapping
from typing import Any

from cifar10.follower.live_copy import LiveCopy, Network
from cifar10.towers.train_state import TrainState


class AttachedCopy(LiveCopy):
    """A copy of a training's variables, made from device to device.

    The training updates the variables of `state`, and `settings` are the content of its
    `config.json`. The variables are copied `every` so many steps, and after step
    `max_steps`. `device` and `use_averages` are as for a `Follower`.
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
            raise ValueError(f"every {every}: it must be at least 1 step.")
        self._state = state
        self._every = every
        self._max_steps = settings["max_steps"]
        self._last_period: int | None = None
        model = state.model
        self._network = Network(model, settings, settings["class_names"], device)
        last_values = [variable.value for variable in model.trainable_variables]
        self._trainable = state.averages if use_averages else last_values
        self._non_trainable = [v.value for v in model.non_trainable_variables]

    def after_step(self, step: int) -> None:
        """Copies the variables if it is time; to be called between two updates.

        After a rollback the step may be less than before.
        """
        period = step if step == self._max_steps else step // self._every
        # No update was applied after a step that was not finite.
        if period == self._last_period or bool(self._state.halted):
            return
        self._last_period = period
        began, since = time.perf_counter(), time.time()
        weights = self._network.weights(step, self._trainable, self._non_trainable)
        self._swap(self._network, weights, since, began)
