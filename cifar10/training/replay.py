"""Recomputes steps of a run outside of its directory, and compares them with it.

The order of the images, their distortions and the masks of dropout are functions of
seed and step, and the number of towers changes nothing but rounding. So every step
follows again from the checkpoint before it.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from cifar10 import model as models
from cifar10.config import fields, layout, run_config
from cifar10.config.config import Config
from cifar10.config.options import options
from cifar10.errors import UsageError, say
from cifar10.input.pipeline import BatchSlice
from cifar10.run_directory import chain, checkpoints, logs, restoring, starting
from cifar10.towers.graphs import split_numbers
from cifar10.towers.towers import Batch
from cifar10.training.assembly import assemble, build_maker

# The metrics of the log that are compared; a prediction that tips over changes the
# precision by far more than rounding does.
_COMPARED = ("total_loss", "cross_entropy", "gradient_norm", "learning_rate")
# How far rounding takes a value within a thousand steps at most, in proportion, where
# sums are added in another order (docs/auditing.md).
BOUNDS = {"float64": 1e-9, "float32": 1e-2, "float16": 0.1, "bfloat16": 0.1}
# A gradient's norm so many times the median of the steps before it is a jump.
_JUMP = 5.0
_STEPS_OF_MEDIAN = 50


class Difference(NamedTuple):
    """How far a recomputed step is from what the run has of it."""

    step: int
    place: str  # Where the run has it: `log` or `checkpoint`.
    largest: float  # In proportion; 0 if all are equal to the last bit.
    name: str  # The metric or the variable that differs most; empty without one.


class Replay:
    """A training assembled like a run's, which goes to any of the run's steps.

    Args:
        run: Directory of the run, to which nothing is written.
        towers: Number of towers; None for as many as the run had.
        data_dir: Place of the data; None for where it was.

    Attributes:
        recorded: The run's `config.json`.
        training: The assembled training.
        step: The step reached.
        is_exact: Whether the same bits are to be expected, on the same kind of machine.

    Raises:
        UsageError: The run's data or model has changed, or its images cannot be divided
            among so many towers.
    """

    def __init__(
        self, run: Path, towers: int | None = None, data_dir: str | None = None
    ) -> None:
        self.recorded = recorded = run_config.read_run_config(run)
        batches = recorded["towers"] * recorded["accumulate"]
        towers = towers or recorded["towers"]
        # As many batches as the run had, so that each has the same images; or else other
        # ones, in a model without batch norm and dropout.
        divides = batches % towers == 0
        values = {
            name: recorded[name] for name in options(fields.ALL) if name in recorded
        }
        values |= {
            "train_dir": str(run),
            "num_gpus": towers,
            "accumulate": batches // towers if divides else 1,
            "global_batch_size": None if divides else recorded["global_batch_size"],
            "split_gpu": 1,
            "steps_per_call": 1,
            "variable_update": "towers",
            "local_workers": None,
            "verify_steps": None,
        }
        if data_dir:
            values["data_dir"] = data_dir
        self.training = assemble(Config.from_values(values))
        settings = self.training.settings
        determining = self.training.determining()
        if found := starting.find_differences(run, recorded, settings, determining):
            lines = [
                f"{name}: {was!r}, now {now!r}" for name, (was, now) in found.items()
            ]
            raise UsageError(
                "This is not what the run was trained on:\n    "
                + "\n    ".join(lines)
                + "\nBring it back; data that has moved is named by --data_dir."
            )
        self.is_exact = (
            recorded["deterministic"]
            and towers == recorded["towers"]
            and recorded.get("workers", 1) == 1
        )
        self.step = 0
        self._run = run
        self._directory = run / layout.CHECKPOINTS
        self._stage: Any = None
        self._initial = [value.read_value() for value in self._variables()]
        links = chain.read(run)
        self._left_out = {link["step"]: link.get("left_out", 0) for link in links}

    @property
    def reached(self) -> int:
        """The last step that the run has logged or saved."""
        lines = logs.read_lines(self._run / layout.METRICS)
        logged = [line["step"] for line in lines if isinstance(line, dict)]
        return max([0, *logged, *checkpoints.steps(self._directory)])

    @property
    def version_note(self) -> str:
        """The versions of the run and of this program where they differ."""
        return starting.version_note(self.recorded, self.training.settings)

    @property
    def bound(self) -> float:
        """The largest difference that is no other computation."""
        return 0.0 if self.is_exact else BOUNDS[self.recorded["precision"]]

    def go_before(self, step: int) -> None:
        """Restores the newest intact checkpoint before a step, or the initial values.

        Raises:
            UsageError: There is none, and the run began with weights from elsewhere.
        """
        state = self.training.towers.state
        later = [at for at in checkpoints.steps(self._directory) if at >= step]
        newest, refused = restoring.restore_newest(
            self._directory,
            lambda found: checkpoints.restore(found, state.trackables()),
            self.recorded,
            skip=later,
        )
        for damaged, error in refused.items():
            say(f"PASSING OVER the damaged checkpoint of step {damaged}: {error}.")
        if newest:
            self._left_out.setdefault(newest.step, newest.manifest.get("left_out", 0))
        elif self.recorded.get("initial_weights"):
            raise UsageError(
                f"No checkpoint before step {step} can be used, and the run began with "
                f"{self.recorded['initial_weights']}, not with values of its seed.\n"
                "Name steps after a checkpoint."
            )
        else:
            self._assign(self._initial)
        self.step = newest.step if newest else 0
        state.halted.assign(False)

    def steps_to(
        self, last: int, before: Callable[[Sequence[Batch]], object] | None = None
    ) -> Iterator[dict[str, float]]:
        """Recomputes the steps up to `last`; yields the metrics of each.

        `before` is called with the batches of each step before its update.
        """
        training, towers = self.training, self.training.towers
        while self.step < last:
            stage = training.config.stage(self.step)
            if stage != self._stage:
                self._stage = stage
                towers.freeze(stage.frozen)
            # A rollback leaves batches out, from a checkpoint on.
            saved = [at for at in sorted(self._left_out) if at > self.step]
            end = min(last, stage.end, *saved[:1])
            with training.open_batches(self.batch, self.step) as queues:
                while self.step < end:
                    batches = queues.get()
                    if before:
                        before(batches)
                    result = towers.step(batches)
                    self.step += 1
                    [metrics], _ = split_numbers(result.numbers.numpy(), result.metrics)
                    yield metrics

    @property
    def batch(self) -> int:
        """The number, from 0, of the next batch of the input."""
        saved = sorted(self._left_out)
        following = [at for at in saved if at > self.step] or saved[-1:]
        return self.step + (self._left_out[following[0]] if following else 0)

    def compare(
        self,
        first: int,
        last: int,
        before: Callable[[Sequence[Batch]], object] | None = None,
    ) -> Iterator[Difference]:
        """Recomputes the steps up to `last`; compares those from `first` on."""
        lines = logs.read_lines(self._run / layout.METRICS)
        logged = {line["step"]: line for line in lines if isinstance(line, dict)}
        for metrics in self.steps_to(last, before):
            if self.step >= first and self.step in logged:
                yield self._to_log(metrics, logged[self.step])
            if self.step >= first and self.step in checkpoints.steps(self._directory):
                yield self._to_checkpoint()

    def _to_log(self, metrics: dict[str, float], line: dict[str, Any]) -> Difference:
        compared = [name for name in _COMPARED if name in metrics and name in line]
        found = {}
        for name in compared:
            logged = np.nan if line[name] is None else line[name]
            found[name] = _proportion(np.array(metrics[name]), np.array(logged))
        return _largest(self.step, "log", found)

    def _to_checkpoint(self) -> Difference:
        state = self.training.towers.state
        ours = [value.numpy() for value in self._variables()]
        try:
            found = checkpoints.verify(self._directory, self.step)
            checkpoints.restore(found, state.trackables())
        except checkpoints.DamagedError as error:
            return Difference(self.step, "checkpoint", np.inf, str(error))
        theirs = [value.numpy() for value in self._variables()]
        self._assign(ours)
        pairs = zip(self._names(), ours, theirs, strict=True)
        return _largest(
            self.step, "checkpoint", {name: _proportion(a, b) for name, a, b in pairs}
        )

    def _assign(self, values: Sequence[Any]) -> None:
        for variable, value in zip(self._variables(), values, strict=True):
            variable.assign(value)

    def _variables(self) -> list[tf.Variable]:
        return self.training.towers.state.variables()

    def _names(self) -> list[str]:
        state = self.training.towers.state
        trained = [variable.path for variable in state.model.trainable_variables]
        others = (*state.model.non_trainable_variables, *state.optimizer.variables)
        averages = (f"average of {path}" for path in trained)
        return [*trained, *(one.path for one in others), *averages, "global_step"]

    def image_names(self) -> list[str]:
        """Returns what to call the images of the next step: their paths, or numbers."""
        config, training = self.training.config, self.training
        images = config.global_batch_size
        whole = BatchSlice(0, images, global_batch_size=images)
        maker = build_maker(config, training.dataset.classes)
        step = tf.constant(self.batch, tf.int64)
        chosen = maker.plan(step, whole, len(training.images)).chosen.numpy()
        paths = (getattr(training.dataset, "paths", None) or {}).get("train")
        return [paths[at] if paths else f"image {at}" for at in chosen.tolist()]

    def find_jump(self, first: int, last: int) -> tuple[float, Sequence[Batch]] | None:
        """Goes to the state before the first step whose gradient jumps.

        Returns the gradient's norm and the step's batches; None if there is no such
        step from `first` to `last`.
        """
        norms: list[float] = []
        begun: list[Any] = []

        def keep(batches: Sequence[Batch]) -> None:
            begun[:] = batches, [value.read_value() for value in self._variables()]

        for metrics in self.steps_to(last, keep):
            norm = metrics["gradient_norm"]
            usual = np.median(norms[-_STEPS_OF_MEDIAN:]) if norms else np.inf
            if self.step >= first and not norm <= _JUMP * usual:
                batches, values = begun
                self._assign(values)
                self.step -= 1
                return norm, batches
            norms.append(norm)
        return None

    def losses(self, batches: Sequence[Batch]) -> np.ndarray:
        """Returns each image's cross entropy before the step, floating [images]."""
        state, loss = self.training.towers.state, self.training.towers.tower.loss
        trained = [variable.value for variable in state.model.trainable_variables]
        others = [variable.value for variable in state.model.non_trainable_variables]
        found = []
        for images, labels in batches:
            logits, _, _ = models.inference(
                state.model, trained, others, images, training=True
            )
            found += [
                float(
                    loss(logits[at : at + 1], labels[at : at + 1], [])["cross_entropy"]
                )
                for at in range(len(images))
            ]
        return np.array(found)

    def heaviest(
        self, batches: Sequence[Batch], most: int
    ) -> tuple[dict[int, float], int]:
        """Finds the images whose gradients are the largest, by halving the batch.

        Returns the norm of each one's gradient by its place in the global batch, the
        largest first, and how many gradients were computed.
        """
        state, tower = self.training.towers.state, self.training.towers.tower
        images, labels = (tf.concat(parts, 0) for parts in zip(*batches, strict=True))
        computed = itertools.count()

        def norm(places: np.ndarray) -> float:
            next(computed)
            taken = tf.gather(images, places), tf.gather(labels, places)
            gradients = tower(state, 0, *taken).gradients
            found = tf.linalg.global_norm([one for one in gradients if one is not None])
            return float(found) if np.isfinite(found) else np.inf

        found: dict[int, float] = {}
        everything = np.arange(len(images))
        parts = [(-norm(everything), 0, everything)]
        number = itertools.count(1)
        while parts and len(found) < most:
            largest, _, places = heapq.heappop(parts)
            if len(places) == 1:
                found[int(places[0])] = -largest
                continue
            for half in np.array_split(places, 2):
                heapq.heappush(parts, (-norm(half), next(number), half))
        return found, next(computed)


def _proportion(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns how far values are from others, in proportion to their norm."""
    if np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f"):
        return 0.0
    if ours.dtype.kind != "f":
        return np.inf
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    size = np.linalg.norm(theirs)
    found = np.linalg.norm(ours - theirs) / size if size else np.inf
    return float(found) if np.isfinite(found) else np.inf


def _largest(step: int, place: str, found: dict[str, float]) -> Difference:
    name = max(found, key=lambda one: found[one], default="")
    return Difference(
        step, place, found.get(name, 0.0), name if found.get(name) else ""
    )
