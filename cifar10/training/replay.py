"""Recomputes steps of a run outside of its directory, and compares them with it.

The order of the images, their distortions and the masks of dropout are functions of
seed and step, and the number of towers changes nothing but rounding. So every step
follows again from the checkpoint before it.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from cifar10 import model as models
from cifar10.config import layout, run_config
from cifar10.config.config import Config
from cifar10.errors import UsageError, say
from cifar10.input.corrections import names_of
from cifar10.input.pipeline import BatchSlice
from cifar10.run_directory import chain, checkpoints, logs, restoring, starting
from cifar10.towers.graphs import split_numbers
from cifar10.towers.towers import Batch
from cifar10.towers.verification import proportion
from cifar10.training.assembly import assemble, build_maker

# The metrics of the log that are compared; a prediction that tips over changes the
# precision by far more than rounding does.
_COMPARED = ("total_loss", "cross_entropy", "gradient_norm", "learning_rate")
# How far rounding takes a value in so many steps after a checkpoint, in proportion,
# where sums are added in another order. It grows as trainings do: later, only what is
# of another size is told from it (docs/auditing.md).
_STEPS_OF_BOUND = 20
BOUNDS = {"float64": 1e-9, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.1}
_LATER_BOUND = 0.5
# A gradient's norm so many times the median of the steps before it is a jump.
_JUMP = 5.0
_STEPS_OF_MEDIAN = 50


class Difference(NamedTuple):
    """How far a recomputed step is from what the run has of it."""

    step: int
    place: str  # Where the run has it: `log` or `checkpoint`.
    largest: float  # In proportion; 0 if all are equal to the last bit.
    name: str  # The metric or the variable that differs most, or what is damaged.
    bound: float  # The largest difference that rounding explains.


class Replay:
    """A training assembled like a run's, which goes to any of the run's steps.

    Args:
        run: Directory of the run, to which nothing is written.
        towers: Number of towers; None for as many as the run had.
        data_dir: Place of the data; None for where it was.

    Attributes:
        run: As above.
        recorded: The run's `config.json`.
        training: The assembled training.
        step: The step reached.
        bound: The largest difference that is no other computation. It is 0 where the
            same bits are to be expected, on the same kind of machine.

    Raises:
        UsageError: The run's data or model has changed, or its images cannot be divided
            among so many towers.
    """

    def __init__(
        self, run: Path, towers: int | None = None, data_dir: str | None = None
    ) -> None:
        self.run = run
        self.recorded = recorded = run_config.read_run_config(run)
        batches = recorded["towers"] * recorded["accumulate"]
        towers = towers or max(1, recorded["towers"])
        # As many batches as the run had, so that each has the same images; or else
        # other ones, in a model without batch norm and dropout.
        divides = batches % towers == 0
        values = run_config.config_to_resume(str(run), {"model": recorded["model"]})
        values |= {
            "num_gpus": towers,
            "accumulate": batches // towers if divides else 1,
            "global_batch_size": None if divides else recorded["global_batch_size"],
            "split_gpu": 1,
            "steps_per_call": 1,
            "variable_update": "towers",
            "local_workers": None,
            "verify_steps": None,
            "data_dir": data_dir or recorded["data_dir"],
        }
        self.training = training = assemble(Config.from_values(values))
        found = starting.find_differences(
            run, recorded, training.settings, training.determining()
        )
        if found:
            changed = (
                f"{name} was {old!r}, now {new!r}" for name, (old, new) in found.items()
            )
            raise UsageError(
                f"The run was trained on something else: {'; '.join(changed)}.\nBring "
                "it back; data that has moved is named by --data_dir."
            )
        alike = {
            "deterministic": True,
            "towers": towers,
            "workers": 1,
            "devices": training.settings["devices"],
        }
        is_exact = all(recorded.get(name) == one for name, one in alike.items())
        self.bound = 0.0 if is_exact else BOUNDS[recorded["precision"]]
        self.step = self._begun = 0
        self._directory = run / layout.CHECKPOINTS
        self._state = training.towers.state
        self._stage: Any = None
        self._initial = self._values()
        # The batches that rollbacks have left out before a checkpoint, by its step.
        self._left_out = {0: 0}
        for step in checkpoints.steps(self._directory):
            with contextlib.suppress(checkpoints.DamagedError):
                manifest = checkpoints.read_manifest(self._directory, step)
                self._left_out[step] = manifest.get("left_out", 0)
        for link in chain.read(run):
            self._left_out[link["step"]] = link.get("left_out", 0)

    @property
    def logged(self) -> dict[int, dict[str, Any]]:
        """The lines that the run has logged, by step."""
        return {
            line["step"]: line for line in logs.read_steps(self.run / layout.METRICS)
        }

    @property
    def batch(self) -> int:
        """The number, from 0, of the next batch of the input."""
        later = [step for step in self._left_out if step > self.step]
        return self.step + self._left_out[min(later, default=max(self._left_out))]

    def go_before(self, step: int) -> None:
        """Restores the newest intact checkpoint before a step, or the initial values.

        Raises:
            UsageError: There is none, and the run began with weights from elsewhere.
        """
        later = [at for at in checkpoints.steps(self._directory) if at >= step]
        newest, refused = restoring.restore_newest(
            self._directory,
            lambda found: checkpoints.restore(found, self._state.trackables()),
            self.recorded,
            skip=later,
        )
        for damaged, error in refused.items():
            say(f"PASSING OVER the damaged checkpoint of step {damaged}: {error}.")
        if newest is None:
            if weights := self.recorded.get("initial_weights"):
                raise UsageError(
                    f"No checkpoint before step {step} can be used, and the run began "
                    f"with {weights}.\nName steps after a checkpoint."
                )
            self._assign(self._initial)
        self.step = self._begun = newest.step if newest else 0
        self._state.halted.assign(False)

    def batches_to(self, last: int) -> Iterator[Sequence[Batch]]:
        """Yields the batches of each step up to `last`, for `advance`."""
        training = self.training
        while self.step < last:
            stage = training.config.stage(self.step)
            if stage != self._stage:
                self._stage = stage
                training.towers.freeze(stage.frozen)
            # A rollback leaves batches out, from a checkpoint on.
            end = min(last, stage.end, *(at for at in self._left_out if at > self.step))
            with training.open_batches(self.batch, self.step) as queues:
                while self.step < end:
                    yield queues.get()

    def advance(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Computes the next step; returns its metrics."""
        result = self.training.towers.step(batches)
        self.step += 1
        [metrics], _ = split_numbers(result.numbers.numpy(), result.metrics)
        return metrics

    def compare(
        self,
        first: int,
        last: int,
        before: Callable[[Sequence[Batch]], object] = lambda _: None,
    ) -> Iterator[Difference]:
        """Recomputes the steps up to `last`; compares those from `first` on.

        `before` is called with the batches of each of these before its update.
        """
        logged, saved = self.logged, checkpoints.steps(self._directory)
        for batches in self.batches_to(last):
            if self.step + 1 < first:
                self.advance(batches)
                continue
            before(batches)
            metrics = self.advance(batches)
            if line := logged.get(self.step):
                names = [name for name in _COMPARED if name in metrics and name in line]
                ours, theirs = ([of[name] for name in names] for of in (metrics, line))
                yield self._largest(
                    "log", names, map(as_logged, ours), map(as_logged, theirs)
                )
            if self.step in saved:
                yield self._to_checkpoint()

    def _to_checkpoint(self) -> Difference:
        """Compares with the checkpoint of the step, from which the replay goes on."""
        ours = self._values()
        try:
            found = checkpoints.verify(self._directory, self.step)
            checkpoints.restore(found, self._state.trackables())
        except checkpoints.DamagedError as error:
            return Difference(self.step, "checkpoint", 2.0, str(error), self.bound)
        model = self._state.model
        kept = (*model.trainable_variables, *model.non_trainable_variables)
        names = [one.path for one in (*kept, *self._state.optimizer.variables)]
        names += ["a moving average"] * (len(ours) - len(names))
        difference = self._largest("checkpoint", names, ours, self._values())
        self._begun = self.step
        return difference

    def _largest(
        self, place: str, names: Iterable[str], *values: Iterable
    ) -> Difference:
        found = [*zip(map(proportion, *values), names, strict=True)]
        is_near = self.step - self._begun <= _STEPS_OF_BOUND
        bound = self.bound if is_near or not self.bound else _LATER_BOUND
        return Difference(self.step, place, *max(found, default=(0.0, "")), bound)

    def find_jump(self, first: int, last: int) -> tuple[float, Sequence[Batch]] | None:
        """Goes to the state before the first step whose gradient jumps.

        Returns the gradient's norm and the step's batches; None if there is no such
        step from `first` to `last`.
        """
        norms: list[float] = []
        for batches in self.batches_to(last):
            begun = self._values()
            norm = self.advance(batches)["gradient_norm"]
            usual = np.median(norms[-_STEPS_OF_MEDIAN:]) if norms else norm
            jumps = not np.isfinite(norm) or norm > _JUMP * usual
            if self.step >= first and jumps:
                self._assign(begun)
                self.step -= 1
                return norm, batches
            if np.isfinite(norm):
                norms.append(norm)
        return None

    def heaviest(self, batches: Sequence[Batch], most: int) -> dict[int, float]:
        """Finds images whose gradients are the largest, by halving the batch.

        Returns the norm of each one's gradient by its place in the global batch, in the
        order in which they were found.
        """
        images, labels = (tf.concat(parts, 0) for parts in zip(*batches, strict=True))

        def norm(places: np.ndarray) -> float:
            taken = tf.gather(images, places), tf.gather(labels, places)
            gradients = self.training.towers.tower(self._state, 0, *taken).gradients
            found = tf.linalg.global_norm([one for one in gradients if one is not None])
            return float(found) if np.isfinite(found) else np.inf

        found: dict[int, float] = {}
        left = np.arange(len(images))
        while len(left) and len(found) < most:
            part = left
            while len(part) > 1:
                part = max(np.array_split(part, 2), key=norm)
            found[int(part[0])] = norm(part)
            left = np.setdiff1d(left, part)
        return found

    def describe(self, batches: Sequence[Batch]) -> list[tuple[str, Any, float]]:
        """Returns name, label and cross entropy of each image of the next step."""
        config, training = self.training.config, self.training
        count, size = len(training.images), config.global_batch_size
        whole = BatchSlice(0, size, global_batch_size=size)
        maker = build_maker(config, training.dataset.classes)
        places = maker.plan(tf.constant(self.batch, tf.int64), whole, count).chosen
        names = names_of(training.dataset, "train", count)
        model, loss = self._state.model, training.towers.tower.loss
        trained = [variable.value for variable in model.trainable_variables]
        others = [variable.value for variable in model.non_trainable_variables]
        described = []
        for images, labels in batches:
            logits, _, _ = models.inference(
                model, trained, others, images, training=True
            )
            for at, label in enumerate(labels.numpy().tolist()):
                one = loss(logits[at : at + 1], labels[at : at + 1], [])
                described.append((label, float(one["cross_entropy"])))
        chosen = [names[place] for place in places.numpy()]
        return [(name, *rest) for name, rest in zip(chosen, described, strict=True)]

    def _values(self) -> list[tf.Tensor]:
        return [variable.read_value() for variable in self._state.variables()]

    def _assign(self, values: Sequence[Any]) -> None:
        for variable, value in zip(self._state.variables(), values, strict=True):
            variable.assign(value)


def as_logged(value: Any) -> float:
    """Returns what a log has of a metric; NaN in place of what it cannot hold."""
    return value if isinstance(value, float) and np.isfinite(value) else np.nan
