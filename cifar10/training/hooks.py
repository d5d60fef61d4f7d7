"""Hooks: objects that are called when something happens in a training.

The console, TensorBoard's files, evaluations and checkpoints are hooks of a training
(`periodic.py` lists them), and those that a user gives to `train` get the same calls.
"""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.towers.update import TrainState


class Run(NamedTuple):
    """The run that a training begins or continues."""

    step: int  # Steps that are done: 0 in a new run.
    train_dir: Path
    settings: Mapping[str, Any]  # The content of its `config.json`.
    state: TrainState  # What the steps update.


class Summary(NamedTuple):
    """The tensors that `--summary_steps` shows, from the newest batches.

    Activations and gradients are computed from the variables as the step has left them,
    by the towers of the process that writes.
    """

    images: tf.Tensor  # The first tower's, distorted and standardized.
    activations: Mapping[str, Any]  # Samples of each layer's output.
    tensors: Mapping[str, tf.Tensor]  # variables/NAME and gradients/NAME.
    weight_losses: Mapping[str, tf.Tensor]  # weight_loss/NAME of regularized variables.


class Hook:
    """All events of a training. A hook has a method for each event that it handles.

    It need not inherit from this class. Methods run in the training's thread, between
    two steps; with several workers, only on the chief. An exception in a method ends
    the training; a note on it says how to resume.
    """

    def on_start(self, run: Run) -> None:
        """Called before the first step, and after a rollback, with the step reached."""

    def on_graph(self, graph: tf.Graph) -> None:
        """Called before step 1, with the graph of a step."""

    def on_step(self, step: int) -> None:
        """Called after each step, or after each call of several (--steps_per_call)."""

    def on_summary(self, step: int, summary: Summary) -> None:
        """Called every --summary_steps, unless that would take too long."""

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called every --log_frequency steps, with the numbers of `metrics.jsonl`."""

    def on_message(self, text: str) -> None:
        """Called with a message for the user, such as a forecast or a warning."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation by the training itself (--eval_steps)."""

    def on_save(self, step: int) -> None:
        """Called before a checkpoint is written; its step is not run again later."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Called when a checkpoint is complete, with its folder."""

    def on_end(self, step: int, why: str) -> None:
        """Called after the last step.

        `why` is `finished`, `stopped` by a signal, or `failed`. A hook whose `on_start`
        was not called, or failed, does not get this call.
        """


EVENTS = tuple(name for name in vars(Hook) if name.startswith("on_"))


class Hooks:
    """Calls hooks in their order, and at the end in reverse order.

    The training's own hooks may also have a method `on_interruption(step)`, called when
    a signal ends the training, and a text `waits_for` if they wait for anything but
    devices. An error in one of the `users`' hooks names the hook, and says what
    `how_to_resume` returns.
    """

    def __init__(
        self,
        hooks: Sequence[object] = (),
        *,
        users: Sequence[object] = (),
        how_to_resume: Callable[[], str] = str,
    ) -> None:
        self._hooks = hooks
        self._users = users
        self._how_to_resume = how_to_resume
        self._started = 0
        self._called: list[object] = []  # A hook may notify others.

    @property
    def waits_for(self) -> str:
        """What the hook that is being called waits for; empty if it does not say."""
        hook = self._called[-1] if self._called else None
        if hook in self._users:
            return f"the hook {type(hook).__name__}"
        return getattr(hook, "waits_for", "")

    def notify(self, event: str, *arguments: Any) -> None:
        """Calls the method of this name on each hook that has one."""
        for hook in self._hooks:
            self._call(hook, event, *arguments)

    def start(self, run: Run) -> None:
        """Reports a start or a rollback to the hooks."""
        for count, hook in enumerate(self._hooks, 1):
            self._call(hook, "on_start", run)
            self._started = max(self._started, count)

    def end(self, step: int, why: str) -> None:
        """Reports the end to every hook that has started, even if one of them fails."""
        with contextlib.ExitStack() as stack:
            for hook in self._hooks[: self._started]:
                stack.callback(self._call, hook, "on_end", step, why)

    def _call(self, hook: object, event: str, *arguments: Any) -> None:
        method = getattr(hook, event, None)
        if method is None:
            return
        self._called.append(hook)
        try:
            method(*arguments)
        except Exception as error:
            if hook in self._users:
                # A note, as the caller may catch this exception by its type.
                error.add_note(
                    f"Raised by the hook {type(hook).__name__}, in {event}. "
                    f"{self._how_to_resume()}"
                )
            raise
        finally:
            self._called.pop()


def handle_each_step(hooks: Sequence[object]) -> bool:
    """Returns whether any hook does something after each step."""
    methods = [hook.on_step for hook in hooks if hasattr(hook, "on_step")]
    return any(getattr(one, "__func__", one) is not Hook.on_step for one in methods)


def check_hooks(hooks: Sequence[object]) -> None:
    """Refuses hooks with no event, an unknown event, or the wrong parameters."""
    for hook in hooks:
        name = type(hook).__name__
        if isinstance(hook, type):
            name = hook.__name__
            raise UsageError(f"hooks: {name} is a class; give an object, {name}().")
        found = [
            event
            for event in dir(hook)
            if event.startswith("on_") and callable(getattr(hook, event))
        ]
        unknown = [event for event in found if event not in EVENTS]
        if unknown or not found:
            raise UsageError(
                f"hooks: {'.'.join([name, *unknown[:1]])} would never be called. "
                f"The events are {', '.join(EVENTS)}."
            )
        for event in found:
            expected = [*inspect.signature(getattr(Hook, event)).parameters][1:]
            try:
                inspect.signature(getattr(hook, event)).bind(*expected)
            except TypeError as error:
                raise UsageError(
                    f"hooks: {name}.{event} is called with ({', '.join(expected)}); "
                    f"{error}."
                ) from error
            except ValueError:  # A method written in C has no signature.
                continue
