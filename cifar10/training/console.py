"""Prints the first lines, the log lines and the last lines of a training run."""

import contextlib
import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.progress
import tensorflow as tf

from cifar10.config import fields
from cifar10.config.config import read_recipe
from cifar10.config.options import Scope, defaults, names
from cifar10.config.python_objects import METRICS
from cifar10.errors import UsageError, first_few
from cifar10.process import invocation
from cifar10.run_directory import early_stopping
from cifar10.towers import hardware
from cifar10.training.assembly import Training
from cifar10.training.hooks import Run
from cifar10.training.loop import Loop
from cifar10.training.results import loss_text
from cifar10.training.timing import HOUR, format_duration, format_number

_SHOWN_CLASSES = 8
_WORTH_SAYING = 10.0  # Seconds; a shorter remaining time needs no forecast.


class Console:
    """A hook that prints log lines and, in a terminal, a progress bar below them.

    `batch_size` is the number of images in a tower's batch.
    """

    waits_for = "the terminal or pipe that takes the output"

    def __init__(self, max_steps: int, batch_size: int) -> None:
        self._batch_size = batch_size
        self._console = rich.console.Console(highlight=False, soft_wrap=True)
        of_all = "" if max_steps == fields.OPEN_STEPS else " of {task.total}"
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed}" + of_all),
            rich.progress.BarColumn(bar_width=None),  # The rest of the line.
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
        """Shows the progress bar at the step that the run has reached."""
        self._progress.reset(self._task, completed=run.step)
        self._progress.start()

    def on_step(self, step: int) -> None:
        """Moves the progress bar to `step`."""
        self._progress.update(self._task, completed=step)

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the metrics of the step."""
        self.on_message(step_line(step, metrics, self._batch_size))

    def on_message(self, text: str) -> None:
        """Prints a message, above the progress bar if there is one."""
        if self._console.is_terminal:
            self._console.print(text, markup=False)
        else:
            # Without rich, which would end the program when a pipe is closed.
            print(f"{text}\n", end="", flush=True)

    def on_end(self, step: int, why: str) -> None:  # noqa: ARG002
        """Removes the progress bar."""
        self._progress.stop()


def step_line(step: int, metrics: Mapping[str, float], batch_size: int) -> str:
    """Returns the log line of a step; "not timed" replaces a rate of NaN.

    As in the tutorial, s/batch is the time of a step divided by its number of batches.
    """
    rate = metrics["examples_per_sec"]
    speed = "not timed"
    if not math.isnan(rate):
        seconds = format_number(batch_size / rate, 2)
        speed = f"{format_number(rate)} images/s, {seconds} s/batch"
    own = "".join(f", {n} {metrics[n]:.3g}" for n in metrics if n.startswith(METRICS))
    return (
        f"step {step}, loss {loss_text(metrics['total_loss'])} "
        f"(CE {loss_text(metrics['cross_entropy'])}), "
        f"accuracy {metrics['precision @ 1']:.3f}, {speed}{own}"
    )


def forecast_line(steps: int, seconds: float) -> str:
    """Returns a forecast of the time left, with advice if a CPU needs over an hour."""
    if seconds < _WORTH_SAYING:
        return ""
    about = f"About {format_duration(seconds)} for the {steps:,} steps left."
    line = f"{about} Ctrl-C saves; the same command resumes."
    if seconds > HOUR and not tf.config.get_visible_devices("GPU"):
        native = hardware.has_bfloat16(["/cpu:0"])
        slow = "" if native else ", and this CPU lacks bfloat16; float32 is slower"
        line += (
            f"\nNo GPU is used{slow}.\n"
            f"An hour is enough for {format_number(steps * HOUR / seconds, 2)} steps; "
            f"{invocation.option_name('max_steps')} sets the number of steps."
        )
    return line


def first_lines(training: Training) -> list[str]:
    """Returns lines that describe a training run, and notes on possible surprises."""
    model = training.towers.state.model
    compiled = ""
    if model.compiled:
        compiled = (
            f"NOTE: {type(model.optimizer).__name__}, the optimizer of the model's "
            "compile(), is not used.\n--optimizer and --learning_rate apply instead."
        )
    return [
        wrap(_parts(training.settings, len(training.images))),
        compiled,
        wrap(_unseen(training.labels, training.dataset.class_names)),
        wrap(training.sections or ""),
    ]


def _unseen(labels: np.ndarray, class_names: Sequence[str]) -> str:
    """Returns a note on classes without training images; empty if there are none."""
    unseen = np.setdiff1d(np.arange(len(class_names)), labels)
    if not unseen.size:
        return ""
    shown = first_few([class_names[number] for number in unseen], _SHOWN_CLASSES)
    return f"NOTE: the training set has no image of {shown}."


def _parts(settings: Mapping[str, Any], examples: int) -> str:
    """Returns lines on a run's towers, data and so on, from `config.json`."""
    global_batch_size = settings["global_batch_size"]
    epoch = examples / global_batch_size
    steps, hours = settings["max_steps"], settings["max_hours"]
    total = f"{steps:,} steps, which are {steps / epoch:,.1f} epochs of"
    total = f"{hours:g} hours; each epoch is" if hours else total
    workers = settings["workers"]
    batches = settings["accumulate"]
    accumulated = f" x {batches} accumulated" if batches > 1 else ""
    is_weighted = settings.get("class_weights")
    of_loss = "Loss:   weighted by class\n" if is_weighted else ""
    on_each = f", on each of {workers} workers" if workers > 1 else ""
    home = f"; variables on {settings['variables_on']}" if settings["on_gpus"] else ""
    return (
        f"Towers: {settings['devices']}{on_each}{home}\n"
        f"Data:   {examples:,} training images of {settings['data_description']}\n"
        f"Model:  {settings['model']}, {settings['parameters']:,} parameters, "
        f"{settings['precision']}\n"
        f"{_recipe_line(settings)}{of_loss}"
        f"Batch:  {settings['batch_size']} images per tower and step x "
        f"{settings['towers']}{accumulated} = {global_batch_size} globally\n"
        f"Length: {total} {epoch:,.1f} steps"
    )


def _recipe_line(settings: Mapping[str, Any]) -> str:
    """Returns a line on the recipe; empty for the recipe `tutorial`.

    The line names the recipe's values that determine the result, except values that a
    flag overrides or that another line shows.
    """
    recipe = settings["recipe"]
    if recipe == "tutorial":
        return ""
    values: dict[str, Any] = {}
    with contextlib.suppress(UsageError):  # On a resume, its file may be gone.
        values = read_recipe(recipe)
    on_other_lines = {"model", *fields.LENGTHS, "batch_size", "global_batch_size"}
    before = defaults(fields.ALL)
    shown = names(fields.ALL, scope=Scope.RESULT, in_flags=True) - on_other_lines
    sets = [
        f"{name} {value}"
        for name, value in values.items()
        if name in shown and settings.get(name) == value != before[name]
    ]
    effect = f", which sets {', '.join(sets)}" if sets else ""
    return f"Recipe: {recipe}{effect}; your own settings override it\n"


def last_lines(loop: Loop) -> list[str]:
    """Returns the last lines: bottleneck, time spent, outcome and next commands."""
    training = loop.training
    config, record = training.config, loop.progress.early_stopping
    shown = training.train_dir
    with contextlib.suppress(OSError, ValueError):  # A shorter path.
        shown = shown.relative_to(Path.cwd())
    what, how = early_stopping.what_next(shown, config, loop.step, record)
    return [
        loop.throughput.timed().bottleneck(),
        wrap(loop.goodput.summary(loop.step, config.global_batch_size)),
        f"Ended at step {loop.step} by --max_hours {config.run.max_hours}."
        if loop.progress.is_time_up
        else "",
        early_stopping.outcome(config, loop.step, record),
        f"Done. The run is in {training.train_dir}",
        f"  {what:10} {how}",
        f"  watch it:  tensorboard --logdir {shlex.quote(str(shown))}",
    ]


def wrap(text: str) -> str:
    """Breaks lines at 80 columns between words, so a long path stays in one piece."""
    wrapper = textwrap.TextWrapper(
        80, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in text.splitlines())
