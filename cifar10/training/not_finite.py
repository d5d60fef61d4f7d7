"""Acts on numbers that are not finite: stops, skips the update, or rolls back.

`update.py` has applied nothing of the bad step when its numbers are read. So its towers
can be computed again, to name the variables, and the state before it can be saved.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from cifar10.config import layout
from cifar10.errors import UsageError, first_few, say
from cifar10.towers.towers import Batch
from cifar10.training.assembly import Training
from cifar10.training.progress import Progress
from cifar10.training.results import NeverFiniteError, NotFiniteError, Results

MOST_ROLLBACKS = 3
_SHOWN_NAMES = 3


class NotFinitePolicy:
    """Applies `--on_nan` when a loss or gradient is not finite."""

    def __init__(
        self, training: Training, progress: Progress, results: Results
    ) -> None:
        self._training = training
        self._towers = training.towers
        self._progress = progress
        self._results = results
        self._rollbacks = 0
        self._rolled_back_to: int | None = None

    def handle(self, error: NotFiniteError) -> None:
        """Rolls back to the last checkpoint, or stops with a `UsageError`."""
        if isinstance(error, NeverFiniteError):  # Each of these updates was skipped.
            raise UsageError(f"Stopped: {error}. {self._advice()}") from error
        self._progress.step = error.step - 1
        bad_batch = self._progress.batch
        with self._training.open_batches(bad_batch, self._progress.step) as batches:
            found = self._gradients(batches.get())
        where = "every single gradient is finite here"
        for tower, names in [*found.items()][:1]:
            shown = first_few(names, _SHOWN_NAMES)
            where = f"the gradients of {tower} are not finite in {shown}"
        what = f"{error}; {where}. {self._save(error, found)}"
        if (
            self._training.config.checkpoints.on_nan == "rollback"
            and self._progress.has_checkpoint()
        ):
            self._roll_back(what, bad_batch)
            return
        raise UsageError(
            f"Stopped: {what} {self._advice()} With --on_nan skip, updates that are "
            "not finite are left out."
        ) from error

    def _roll_back(self, what: str, bad_batch: int) -> None:
        """Restores the last checkpoint, and skips all batches since."""
        failed = self._progress.step + 1
        messages = self._progress.restore()
        self._progress.share(self._towers)
        step = self._progress.step
        self._rollbacks = self._rollbacks + 1 if step == self._rolled_back_to else 1
        self._rolled_back_to = step
        if self._rollbacks > MOST_ROLLBACKS:
            raise UsageError(
                f"Stopped: {what} {MOST_ROLLBACKS} rollbacks to the checkpoint of step "
                f"{step} have not helped. {self._advice()}"
            )
        self._progress.left_out = bad_batch + 1 - step
        self._results.drop()
        for message in messages:
            say(message)
        since = f"steps {step + 1} to {failed}" if failed > step + 1 else "that step"
        say(
            f"ROLLED BACK to the checkpoint of step {step}, without the images of "
            f"{since}: {what}"
        )

    def _save(self, error: NotFiniteError, gradients: dict[str, list[str]]) -> str:
        """Writes the debug checkpoint; returns a sentence that says where."""
        facts = {"step": error.step, "what": error.what, "gradients": gradients}
        try:
            directory = self._training.train_dir / layout.DEBUG_CHECKPOINTS
            path = self._progress.save_for_debugging(directory, {"not_finite": facts})
        except UsageError as unwritten:
            return f"The state before that step is lost: {unwritten}"
        where = f"in {path}" if path else "with the chief"
        return f"The state before that step is {where}."

    def _gradients(self, batches: Sequence[Batch]) -> dict[str, list[str]]:
        """Returns the variables without finite gradients, by tower of this process."""
        variables = self._towers.state.model.trainable_variables
        found = {}
        results = self._towers.results(batches)
        for tower, result in enumerate(results, start=self._towers.first_tower):
            names = [
                variable.path
                for variable, gradient in zip(variables, result.gradients, strict=True)
                if gradient is not None
                and not np.isfinite(tf.convert_to_tensor(gradient)).all()
            ]
            if names:
                found[f"tower {tower} ({self._towers.tower_names[tower]})"] = names
        return found

    def _advice(self) -> str:
        rate = self._training.config.update.learning_rate
        return (
            f"A lower --learning_rate than {rate}, "
            "--clip_norm or --warmup_epochs usually helps, with another --train_dir. "
            f"{self._progress.how_to_resume()}"
        )
