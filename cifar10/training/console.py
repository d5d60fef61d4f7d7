"""Prints the first lines, the log lines and the last lines of a training run."""

import math
import shlex
import textwrap
from collections.abc import Mapping
from typing import Any

from cifar10.config.python_objects import METRICS
from cifar10.errors import rounded
from cifar10.process import invocation
from cifar10.run_directory import early_stopping
from cifar10.training.assembly import Training
from cifar10.training.loop import Loop
from cifar10.training.results import divergence
from cifar10.training.timing import format_number


class Console:
    """A hook that prints messages, and a line for each logged step.

    `batch_size` is the number of images in a tower's batch.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the metrics of the step."""
        self.on_message(step_line(step, metrics, self._batch_size))

    def on_message(self, text: str) -> None:
        """Prints a message."""
        # One write per message, because several workers may share the output.
        print(f"{text}\n", end="", flush=True)


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
        f"step {step}, loss {rounded(metrics['total_loss'], 2)} "
        f"(CE {rounded(metrics['cross_entropy'], 2)}), "
        f"accuracy {metrics['precision @ 1']:.3f}, {speed}{own}"
    )


def first_lines(training: Training) -> list[str]:
    """Returns lines that describe a training run."""
    return [
        wrap(_parts(training.settings, len(training.images))),
        wrap(training.sections or ""),
    ]


def _parts(settings: Mapping[str, Any], examples: int) -> str:
    """Returns lines on a run's towers, data and so on, from `config.json`."""
    global_batch_size = settings["global_batch_size"]
    epoch = examples / global_batch_size
    steps, hours = settings["max_steps"], settings["max_hours"]
    total = f"{steps:,} steps, which are {steps / epoch:,.1f} epochs of"
    total = f"{hours:g} hours; each epoch is" if hours else total
    workers = settings["workers"]
    on_each = f", on each of {workers} workers" if workers > 1 else ""
    batches = settings["accumulate"]
    accumulated = f" x {batches} accumulated" if batches > 1 else ""
    home = f"; variables on {settings['variables_on']}" if settings["on_gpus"] else ""
    recipe = settings["recipe"]
    of_recipe = f"Recipe: {recipe}\n" if recipe != "tutorial" else ""
    return (
        f"Towers: {settings['devices']}{on_each}{home}\n"
        f"Data:   {examples:,} training images of {settings['data_description']}\n"
        f"Model:  {settings['model']}, {settings['parameters']:,} parameters, "
        f"{settings['precision']}\n"
        f"{of_recipe}"
        f"Batch:  {settings['batch_size']} images per tower and step x "
        f"{settings['towers']}{accumulated} = {global_batch_size} globally\n"
        f"Length: {total} {epoch:,.1f} steps"
    )


def last_lines(loop: Loop) -> list[str]:
    """Returns the last lines: bottleneck, outcome and next commands."""
    training = loop.training
    config, record = training.config, loop.progress.early_stopping
    shown = training.train_dir
    by_hours = f"Ended at step {loop.step} by --max_hours {config.run.max_hours}."
    return [
        loop.timer.bottleneck(),
        by_hours if loop.progress.is_time_up else "",
        early_stopping.outcome(config, loop.step, record),
        wrap(divergence(training.settings, loop.progress.metric_averages)),
        f"Done. The run is in {training.train_dir}",
        f"  score it:  {invocation.to_score(str(shown), config.values)}",
        f"  watch it:  tensorboard --logdir {shlex.quote(str(shown))}",
    ]


def wrap(text: str) -> str:
    """Breaks lines at 80 columns between words, so a long path stays in one piece."""
    wrapper = textwrap.TextWrapper(
        80, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in text.splitlines())
