"""The console of a training: a line every few steps, and a progress bar."""

import math
from collections.abc import Mapping

import rich.console
import rich.progress
import tensorflow as tf

from cifar10.process import invocation
from cifar10.towers import hardware
from cifar10.training.hooks import Run
from cifar10.training.results import loss_text
from cifar10.training.timing import HOUR, duration, significant

_WORTH_SAYING = 10.0  # Seconds; a shorter rest needs no forecast.


class Console:
    """A hook that prints lines, and below them a progress bar in a terminal.

    `batch_size` is the number of images that a tower takes in a step.
    """

    waits_for = "the reader of its output"

    def __init__(self, max_steps: int, batch_size: int) -> None:
        self._batch_size = batch_size
        self._console = rich.console.Console(highlight=False, soft_wrap=True)
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed} of {task.total}"),
            rich.progress.BarColumn(bar_width=None),  # What the numbers leave.
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("left"),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
            expand=True,
        )
        self._task = self._progress.add_task("train", total=max_steps)

    def on_start(self, run: Run) -> None:
        """Shows the bar, starting from the step that a run has reached."""
        self._progress.reset(self._task, completed=run.step)
        self._progress.start()

    def on_step(self, step: int) -> None:
        """Moves the bar."""
        self._progress.update(self._task, completed=step)

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the step's line."""
        self.on_message(step_line(step, metrics, self._batch_size))

    def on_message(self, text: str) -> None:
        """Prints a message, above the bar if there is one."""
        if self._console.is_terminal:
            self._console.print(text, markup=False)
        else:
            # Not through rich, which ends the program itself when a pipe is closed.
            print(f"{text}\n", end="", flush=True)

    def on_end(self, step: int, why: str) -> None:  # noqa: ARG002
        """Removes the bar."""
        self._progress.stop()


def step_line(step: int, metrics: Mapping[str, float], batch_size: int) -> str:
    """Returns the line of a step; `examples_per_sec` is NaN if no step was timed.

    As in the tutorial, seconds a batch are those of the step divided among the towers.
    """
    rate = metrics["examples_per_sec"]
    speed = "not timed"
    if not math.isnan(rate):
        seconds = significant(batch_size / rate, 2)
        speed = f"{significant(rate)} images/s, {seconds} s/batch"
    return (
        f"step {step}, loss {loss_text(metrics['total_loss'])} "
        f"(CE {loss_text(metrics['cross_entropy'])}), "
        f"accuracy {metrics['precision @ 1']:.3f}, {speed}"
    )


def forecast_line(steps: int, seconds: float) -> str:
    """Returns a forecast for the steps left, with advice if a CPU is too slow."""
    if seconds < _WORTH_SAYING:
        return ""
    about = f"About {duration(seconds)} for the {steps:,} steps left."
    again = "--resume" if invocation.takes_flags() else "the same call"
    line = f"{about} Ctrl-C saves; {again} continues."
    if seconds > HOUR and not tf.config.get_visible_devices("GPU"):
        native = hardware.has_bfloat16(["/cpu:0"])
        slow = "" if native else ", and bfloat16 is not native here; float32 takes long"
        line += (
            f"\nNo GPU is used{slow}.\n"
            f"An hour is enough for {significant(steps * HOUR / seconds, 2)} steps; "
            f"--max_steps sets their number."
        )
    return line
