"""Prints the first lines, the log lines and the last lines of a training run."""

import math
import re
import shlex
import textwrap
import time
from collections.abc import Mapping

from cifar10.config import data_flag
from cifar10.config.python_objects import METRICS
from cifar10.errors import counted, first_few, format_duration, format_number, rounded
from cifar10.input.dataset_base import numbered_class_names
from cifar10.models.step_metrics import PRECISION, STEP_METRICS
from cifar10.process import invocation
from cifar10.process.moving_line import LINE, SECONDS_BETWEEN_DRAWINGS
from cifar10.run_directory import early_stopping
from cifar10.run_directory.averages import divergence
from cifar10.towers import noise_scale
from cifar10.training.assembly import Training
from cifar10.training.loop import Loop

# The number of step lines printed at once, and the seconds between later lines.
_LINES_AT_ONCE = 10
_ON_TERMINAL = 30.0
_ELSEWHERE = 5.0


class Console:
    """Prints messages and lines of logged steps.

    The first lines of a process are printed at once, later ones at most every few
    seconds. On a terminal, the moving line shows the newest values in between.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._batch_size = loop.training.config.batch.batch_size
        self._at_once = _LINES_AT_ONCE
        self._next_line = self._next_drawing = 0.0
        self._newest: Mapping[str, float] = {}
        self._held = ""

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the metrics of the step, or keeps them for the moving line."""
        self._newest = metrics
        self._held = step_line(step, metrics, self._batch_size)
        now = time.monotonic()
        is_last = step >= self._loop.training.config.run.max_steps
        if self._at_once or is_last or now >= self._next_line:
            self._at_once = max(0, self._at_once - 1)
            self._next_line = now + (_ON_TERMINAL if LINE.stream else _ELSEWHERE)
            self._print_held()

    def on_step(self, step: int) -> None:
        """Draws the moving line."""
        now = time.monotonic()
        if LINE.stream and self._newest and now >= self._next_drawing:
            self._next_drawing = now + SECONDS_BETWEEN_DRAWINGS
            LINE.show(self._moving(step, self._newest))

    def on_message(self, text: str) -> None:
        """Prints a message."""
        # One write per message, because several workers may share the output.
        print(f"{text}\n", end="", flush=True)

    def on_end(self, step: int, why: str) -> None:  # noqa: ARG002
        """Prints the last logged step."""
        self._print_held()

    def _print_held(self) -> None:
        if self._held:
            self.on_message(self._held)
        self._held = ""

    def _moving(self, step: int, metrics: Mapping[str, float]) -> str:
        """Returns the moving line; what matters most fits in 80 columns."""
        training, timer = self._loop.training, self._loop.timer
        epochs = training.config.global_batch_size / len(training.images)
        most, left = training.config.run.max_steps, ""
        done = f"step {step}/{most}, epoch {step * epochs:.1f}/{most * epochs:.4g}"
        if training.config.run.max_hours is not None:
            done = f"step {step}, epoch {step * epochs:.1f}"
        elif timer.steps:
            seconds = (most - step) * timer.step_seconds() / timer.steps
            left = f", {format_duration(seconds)} left"
        rate = metrics["examples_per_sec"]
        speed = "" if math.isnan(rate) else f", {format_number(rate)} images/s"
        return (
            f"{done}, loss {rounded(metrics['total_loss'], 2)}, accuracy "
            f"{metrics[PRECISION]:.3f}{left}{speed}"
        )


def step_line(step: int, metrics: Mapping[str, float], batch_size: int) -> str:
    """Returns the log line of a step; "not timed" replaces a rate of NaN."""
    # As in the tutorial, s/batch is a step's time divided by its number of batches.
    rate = metrics["examples_per_sec"]
    speed = "not timed"
    if not math.isnan(rate):
        seconds = format_number(batch_size / rate, 2)
        speed = f"{format_number(rate)} images/s, {seconds} s/batch"
    labels = {name: one.label for name, one in STEP_METRICS.items() if one.label}
    shown = "".join(f", {labels[name]} {metrics[name]:.3f}" for name in labels)
    own = "".join(f", {n} {metrics[n]:.3g}" for n in metrics if n.startswith(METRICS))
    return (
        f"step {step}, loss {rounded(metrics['total_loss'], 2)} "
        f"(CE {rounded(metrics['cross_entropy'], 2)}){shown}, {speed}{own}"
    )


def first_lines(training: Training) -> list[str]:
    """Returns lines that describe a training run."""
    config, facts, examples = training.config, training.run.facts, len(training.images)
    network, machine = config.network, config.machine
    epoch = examples / config.global_batch_size
    steps, hours = config.run.max_steps, config.run.max_hours
    total = f"{counted(steps, 'step')}, {format_number(steps / epoch, 4)} epochs of"
    total = f"{hours:g} hours; each epoch is" if hours else total
    on_each = f", on each of {machine.workers} workers" if machine.workers > 1 else ""
    batches = config.batch.accumulate
    accumulated = f" x {batches} accumulated" if batches > 1 else ""
    home = f"; variables on {facts.variables_on}" if facts.on_gpus else ""
    recipe = config.run.recipe
    of_recipe = f"Recipe: {recipe}\n" if recipe != "tutorial" else ""
    parts = (
        f"Towers: {facts.devices}{on_each}{home}\n"
        f"Data:   {examples:,} training images of {facts.data_description}\n"
        f"Model:  {network.model}, {facts.parameters:,} parameters, "
        f"{network.precision}\n"
        f"{of_recipe}"
        f"Batch:  {config.batch.batch_size} images per tower and step x "
        f"{machine.towers}{accumulated} = {config.global_batch_size} globally\n"
        f"Length: {total} {epoch:,.1f} steps"
    )
    return [*map(wrap, [parts, training.sections or "", mirroring_note(training)])]


def mirroring_note(training: Training) -> str:
    """Returns a note if mirroring pictures may change their classes; else ""."""
    config, sides = training.config, {"left": "right", "right": "left"}
    distortions = config.images.distortions
    if distortions == "none" or config.dataset.data in data_flag.NAMES:
        return ""
    folded = [name.casefold() for name in training.run.facts.class_names]
    mirrored = [re.sub("left|right", lambda m: sides[m[0]], one) for one in folded]
    changed = [a for a, b in zip(folded, mirrored, strict=True) if a != b in folded]
    if len(folded) >= 10 and max(map(len, folded)) == 1:  # Digits or letters.
        changed = folded
    note = f"Note: --distortions {distortions} mirrors pictures"
    fix = "give a new run --distortions none."
    if changed:
        return f"{note}, which may change their class ({first_few(changed, 3)}): {fix}"
    are_named = (*folded,) != numbered_class_names(len(folded))  # Unlike arrays'.
    if are_named or config.given & {"distortions", "resume"}:
        return ""
    return f"{note}. For digits, letters and the like, {fix}"


def last_lines(loop: Loop) -> list[str]:
    """Returns the last lines: bottleneck, outcome and next commands."""
    training = loop.training
    config, record = training.config, loop.progress.early_stopping
    named = config.network.model, training.dataset.name
    noise = noise_scale.in_words(loop.progress.noise_averages, config.global_batch_size)
    by_hours = f"Ended at step {loop.step} by --max_hours {config.run.max_hours}."
    return [
        loop.timer.bottleneck(),
        by_hours if loop.progress.is_time_up else "",
        early_stopping.outcome(config, loop.step, record),
        wrap(divergence(config, loop.progress.metric_averages) or noise),
        f"Done. The run is in {training.train_dir}",
        f"  score it:  {invocation.to_score(training.train_dir, *named)}",
        f"  watch it:  tensorboard --logdir {shlex.quote(str(training.train_dir))}",
    ]


def wrap(text: str) -> str:
    """Breaks lines at 80 columns between words, so a long path stays in one piece."""
    wrapper = textwrap.TextWrapper(
        80, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in text.splitlines())
