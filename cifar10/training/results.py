"""Reads the results of steps, checks that they are finite, and averages them.

Reading a result waits for the device that computes it. So results are collected and
read together, when a line is logged or a checkpoint is due.

`update.py` applies no update that is not finite. So when a step's result turns out not
to be finite, the state before that step can still be saved. The step's gradients can be
computed again, to name the variables whose gradients are not finite.
"""

import shlex
from collections.abc import Iterator

import numpy as np

from cifar10.config import data_flag, layout
from cifar10.errors import CorruptedError, NotFiniteError, UsageError, first_few, say
from cifar10.models.step_metrics import STEP_METRICS
from cifar10.process import invocation
from cifar10.run_directory.averages import average, divergence, how_to_prevent
from cifar10.towers import noise_scale
from cifar10.towers.graphs import split_numbers
from cifar10.towers.towers import StepResult
from cifar10.training.assembly import Training
from cifar10.training.progress import Progress

# A few bad images do not spoil this many steps in a row: later ones would fail too.
MOST_SKIPPED_IN_A_ROW = 10

MOST_ROLLBACKS = 3


class NeverFiniteError(NotFiniteError):
    """A loss or gradient is not finite, and probably stays so in later steps."""


class NotFiniteStateError(NotFiniteError):
    """A step with finite results has left variables that are not finite."""


class Results:
    """Collects the results of steps until they are read, and averages them.

    `progress` keeps the moving averages of metrics, and the number of skipped steps. A
    step that is not finite raises an error or, with `--on_nan skip`, counts as skipped.
    """

    def __init__(self, progress: Progress, training: Training) -> None:
        self._progress = progress
        self._training = training
        self._skipped_in_a_row = 0
        self._pending: list[tuple[int, StepResult]] = []

    def add(self, step: int, result: StepResult) -> None:
        """Adds the result of a call whose last step is `step`; waits for no device."""
        self._pending.append((step, result))

    def clear(self) -> None:
        """Discards the unread results, whose steps will be run again."""
        self._pending = []

    def wait(self) -> None:
        """Waits until the devices have computed all results."""
        if self._pending:
            self._pending[-1][1].numbers.numpy()

    def read(self, *, skip_newest: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
        """Reads and checks new results, except those of the `skip_newest` newest calls.

        Yields each step, its metrics, and the metrics' moving averages at that step.
        """
        count = max(len(self._pending) - skip_newest, 0)
        # Cleared first: if a step is not finite, no later result counts.
        pending, later = self._pending[:count], self._pending[count:]
        self._pending = []
        for last_step, result in pending:
            of_steps, losses = split_numbers(result.numbers.numpy(), result.metrics)
            first_step = last_step - (len(losses) - 1)
            for step, metrics in enumerate(of_steps, first_step):
                self._count(step, metrics, losses[step - first_step])
                averages = self._progress.metric_averages
                # A damaged checkpoint may hold names that event files cannot store.
                known = [name for name in STEP_METRICS if name in averages]
                yield step, metrics | {f"{n}/average": averages[n] for n in known}
        self._pending = later

    def _count(self, step: int, newest: dict[str, float], losses: np.ndarray) -> None:
        square = newest.pop(noise_scale.SQUARE, None)
        if problem := self._not_finite(losses, newest["gradient_norm"]):
            if self._training.config.checkpoints.on_nan != "skip":
                raise NotFiniteError(step, problem)
            say(f"SKIPPED the update of step {step}: {problem}.")
            self._progress.log_event(step, "skip", problem)
            self._progress.skipped_steps += 1
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row < MOST_SKIPPED_IN_A_ROW:
                return
            last = f"the updates of the last {MOST_SKIPPED_IN_A_ROW} steps"
            raise NeverFiniteError(step, f"{last} were all skipped")
        if newest.get("loss_scale", 1.0) < 1.0:
            why = "the gradients are not finite in float16 with any loss scale"
            raise NeverFiniteError(step, why)
        self._skipped_in_a_row = 0
        averages, config = self._progress.metric_averages, self._training.config
        before = divergence(config, averages)
        average(averages, newest, self._training.dataset.classes)
        if not before and (found := divergence(config, averages)):
            self._progress.log_event(step, "divergence", found)
        norm, losses_of = newest["gradient_norm"], len(losses)
        noise_scale.observe(self._progress.noise_averages, square, norm, losses_of)

    def _not_finite(self, losses: np.ndarray, gradient_norm: float) -> str:
        """Describes a non-finite loss or gradient norm; empty if all are finite."""
        for tower in np.flatnonzero(~np.isfinite(losses)):
            name = self._training.towers.tower_names[tower]
            return f"the loss of tower {tower} ({name}) is {losses[tower]}"
        if not np.isfinite(gradient_norm):
            return f"the norm of the averaged gradients is {gradient_norm}"
        return ""


class NotFinitePolicy:
    """Applies `--on_nan` when a loss or gradient is not finite."""

    def __init__(self, training: Training, progress: Progress) -> None:
        self._training = training
        self._towers = training.towers
        self._progress = progress
        self._rollbacks = 0
        self._rolled_back_to: int | None = None

    def handle(self, error: NotFiniteError) -> None:
        """Rolls back to the last checkpoint, or stops with a `UsageError`."""
        if isinstance(error, NeverFiniteError):  # Each of these updates was skipped.
            advice = self._advice(error.step, error.step)
            raise UsageError(f"Stopped: {error}. {advice}") from error
        self._progress.step = error.step - 1
        what, found = str(error), {}
        bad_batch = None if isinstance(error, CorruptedError) else self._progress.batch
        if isinstance(error, CorruptedError):
            advice = "Test the machine's hardware, and resume on another machine. "
            advice += self._progress.how_to_resume()
        elif isinstance(error, NotFiniteStateError):  # Nothing was undone.
            self._progress.step = error.step
            advice = "--on_nan rollback leaves out the images since a checkpoint. "
            first = (self._progress.last_saved() or 0) + 1
            advice += self._advice(first, error.step)
        else:
            found = self._gradients(self._progress.batch)
            what = f"{what}; {_where(found)}"
            advice = "--on_nan skip leaves out updates that are not finite. "
            advice += self._advice(error.step, error.step)
        what = f"{what}. {self._save(error, found)}"
        if self._training.config.checkpoints.on_nan == "rollback":
            self._roll_back(what, bad_batch, error.step)
            return
        raise UsageError(f"Stopped: {what} {advice}") from error

    def _roll_back(self, what: str, bad_batch: int | None, failed: int) -> None:
        """Restores the last checkpoint, and skips all batches up to `bad_batch`."""
        messages = self._progress.restore()
        self._progress.broadcast(self._towers)
        step = self._progress.step
        self._rollbacks = self._rollbacks + 1 if step == self._rolled_back_to else 1
        self._rolled_back_to = step
        if self._rollbacks > MOST_ROLLBACKS:
            raise UsageError(
                f"Stopped: {what} {MOST_ROLLBACKS} rollbacks to the checkpoint of step "
                f"{step} have not helped. {self._advice(step + 1, failed)}"
            )
        without = ""
        if bad_batch is not None:
            self._progress.left_out = bad_batch + 1 - step
            self._progress.keep()
            without = f", without the images of steps {step + 1} to {failed}"
        for message in messages:
            say(message)
        say(f"ROLLED BACK to the checkpoint of step {step}{without}: {what}")
        # The restored step's, since the lines of later ones are dropped.
        self._progress.log_event(step, "rollback", what)

    def _save(self, error: NotFiniteError, gradients: dict[str, list[str]]) -> str:
        """Writes a debug checkpoint, and returns a sentence that says where."""
        facts = {"step": error.step, "what": error.problem, "gradients": gradients}
        when = "after" if self._progress.step == error.step else "before"
        try:
            directory = self._training.train_dir / layout.DEBUG_CHECKPOINTS
            path = self._progress.save_for_debugging(directory, {"not_finite": facts})
        except UsageError as unwritten:
            return f"The state {when} that step could not be saved: {unwritten}"
        where = f"in {path}" if path else "by the chief"
        return f"The state {when} that step was saved {where}."

    def _gradients(self, batch: int) -> dict[str, list[str]]:
        """Returns which variables' gradients are not finite, for each local tower."""
        variables = self._towers.state.model.trainable_variables
        found = {}
        with self._training.open_batches(batch, self._progress.step) as batches:
            results = self._towers.results(batches.get())
        for tower, result in enumerate(results, start=self._towers.first_tower):
            if names := [
                variable.path
                for variable, gradient in zip(variables, result.gradients, strict=True)
                if gradient is not None and not np.isfinite(gradient).all()
            ]:
                found[f"tower {tower} ({self._towers.tower_names[tower]})"] = names
        return found

    def _advice(self, first: int, last: int) -> str:
        """Returns advice on steps `first` to `last`, whose results are not finite."""
        prevented = how_to_prevent(self._training.config)
        how = f"{prevented} {self._progress.how_to_resume()}"
        if self._training.dataset.name.startswith(data_flag.PYTHON):
            return how  # A command cannot load the data.
        run = shlex.quote(str(self._training.train_dir))
        find = f"{invocation.command('replay')} {run} --steps {first}:{last} --find"
        return f"{how}\nFind the images that caused it with:\n    {find}"


def _where(gradients: dict[str, list[str]]) -> str:
    """Names the first tower whose gradients are not finite, and some of these."""
    if not gradients:
        return "all gradients of this process are finite"
    tower, names = next(iter(gradients.items()))
    return f"the gradients of {tower} are not finite in {first_few(names, 3)}"
