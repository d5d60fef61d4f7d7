"""Hooks: objects whose methods are called at the events of a training run.

Printing, TensorBoard, evaluation and checkpointing are built-in hooks, which
`periodic.py` lists. Hooks that a user passes to `train` get the same calls.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.towers.update import TrainState


class Run(NamedTuple):
    """The started or resumed run, as passed to `Hook.on_start`.

    Example:
        >>> x, y = np.zeros([64, 32, 32, 3], np.uint8), np.arange(64) % 2
        >>> class Start:
        ...     def on_start(self, run):
        ...         self.run = run
        >>> start = Start()
        >>> record = train(Config(data=(x, y), max_steps=2, batch_size=8), [start])
        Towers: ...
        >>> start.run.step, start.run.settings["seed"]
        (0, 0)
    """

    step: int  # The number of steps done so far; 0 in a new run.
    train_dir: Path
    settings: Mapping[str, Any]  # The content of `config.json`.
    state: TrainState  # The variables that each step updates.


class Summary(NamedTuple):
    """The tensors that `--summary_steps` writes, from the newest batches.

    The chief's towers compute activations and gradients from these batches, with the
    variables' values after the newest step.
    """

    images: tf.Tensor  # The first tower's images, distorted and standardized.
    activations: Mapping[str, Any]  # Samples of each layer's output.
    tensors: Mapping[str, tf.Tensor]  # variables/NAME and gradients/NAME.
    weight_losses: Mapping[str, tf.Tensor]  # weight_loss/NAME of regularized variables.


class Hook:
    """The events of a training run. A hook has a method for each event it handles.

    A hook need not inherit from this class. Its methods run between two steps, in the
    thread that trains; with several workers, only on the chief. An exception in a
    method ends the run; a note added to the exception says how to resume.

    Example:
        >>> x, y = np.zeros([64, 32, 32, 3], np.uint8), np.arange(64) % 2
        >>> class Losses:
        ...     def on_start(self, run):
        ...         self.by_step = {}
        ...     def on_log(self, step, metrics):
        ...         self.by_step[step] = metrics["total_loss"]
        >>> losses = Losses()
        >>> config = Config(data=(x, y), max_steps=4, batch_size=8, log_frequency=2)
        >>> record = train(config, hooks=[losses])
        Towers: ...
        >>> sorted(losses.by_step)
        [2, 4]
    """

    def on_start(self, run: Run) -> None:
        """Called before the first step, and again after each rollback."""

    def on_graph(self, graph: tf.Graph) -> None:
        """Called before step 1, with the TensorFlow graph of a step."""

    def on_step(self, step: int) -> None:
        """Called after each step, or after the --steps_per_call steps of one call."""

    def on_summary(self, step: int, summary: Summary) -> None:
        """Called every --summary_steps steps; less often if summaries take too long."""

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called every --log_frequency steps, with the metrics for `metrics.jsonl`."""

    def on_message(self, text: str) -> None:
        """Called with a message for the user, such as a forecast or a warning."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation during training (--eval_steps)."""

    def on_save(self, step: int) -> None:
        """Called before a checkpoint is written, for example to flush files."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Called when a checkpoint is complete; `path` is its folder."""

    def on_end(self, step: int, why: str) -> None:
        """Called after the last step.

        `why` is `finished`, `stopped` (by a signal) or `failed`. Only hooks whose
        `on_start` has succeeded get this call.
        """


EVENTS = tuple(name for name in vars(Hook) if name.startswith("on_"))


@dataclasses.dataclass
class Hooks:
    """Calls hooks in their order, and `on_end` in reverse order.

    A built-in hook may also have a method `on_interruption(step)`, called when a signal
    ends the run. `users` tells which hooks the user wrote. If such a hook raises an
    exception, it gets a note with the hook's name and the text of `how_to_resume()`.
    """

    hooks: Sequence[object] = ()
    users: Sequence[object] = ()
    how_to_resume: Callable[[], str] = str
    _started: int = 0

    def notify(self, event: str, *arguments: Any) -> None:
        """Calls the method named `event` on each hook that has this method."""
        for hook in self.hooks:
            self._call(hook, event, *arguments)

    def start(self, run: Run) -> None:
        """Calls `on_start` on each hook."""
        for count, hook in enumerate(self.hooks, 1):
            self._call(hook, "on_start", run)
            self._started = max(self._started, count)

    def end(self, step: int, why: str) -> None:
        """Calls `on_end` on every hook that has started, even if another hook fails."""
        with contextlib.ExitStack() as stack:
            for hook in self.hooks[: self._started]:
                stack.callback(self._call, hook, "on_end", step, why)

    def _call(self, hook: object, event: str, *arguments: Any) -> None:
        if (method := getattr(hook, event, None)) is None:
            return
        try:
            method(*arguments)
        except Exception as error:
            if hook in self.users:
                # A note keeps the exception's type, by which a caller may catch it.
                where = f"Raised by the hook {type(hook).__name__}, in {event}."
                error.add_note(f"{where} {self.how_to_resume()}")
            raise


def check_hooks(hooks: Sequence[object]) -> None:
    """Refuses a hook without events or with unknown events."""
    for hook in hooks:
        name = type(hook).__name__
        found = [event for event in dir(hook) if event.startswith("on_")]
        methods = [it for event in found if (it := getattr(hook, event)) is not None]
        wrong = [it for it in methods if iscoroutinefunction(it) or not callable(it)]
        if wrong or isinstance(hook, type):
            raise UsageError(f"hooks: {hook!r}: give an object with plain methods.")
        if (unknown := [event for event in found if event not in EVENTS]) or not found:
            why = f"hooks: {'.'.join([name, *unknown[:1]])} would never be called"
            raise UsageError(f"{why}. The events are {', '.join(EVENTS)}.")
