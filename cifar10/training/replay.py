"""Recomputes steps of a run outside of its directory, and compares them with it.

The order of the images, their distortions and the masks of dropout are functions of
seed and step, and the number of towers changes nothing but rounding. So every step
follows again from the checkpoint before it.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tensorflow as tf

from cifar10 import model as models
from cifar10.config import layout, run_config
from cifar10.config.config import Config
from cifar10.errors import UsageError, counted, say
from cifar10.evaluation.scored_set import ScoredSet
from cifar10.input.corrections import names_of
from cifar10.input.pipeline import shuffled_indices
from cifar10.run_directory import chain, checkpoints, logs, restoring, scores, starting
from cifar10.towers.graphs import split_numbers
from cifar10.towers.towers import Batch
from cifar10.towers.verification import BOUNDS, proportion
from cifar10.training.assembly import Training, assemble
from cifar10.training.periodic import scored_set

# The values that are compared in a line of the log, and in scores. Not a step's
# precision: one prediction that changes moves it by far more than rounding does.
_LOGGED = ("total_loss", "cross_entropy", "gradient_norm", "learning_rate")
_SCORES = ("precision @ 1", "cross_entropy")
_PARTS: tuple[Literal["val", "test"], ...] = ("val", "test")
# Another processor rounds otherwise: a few images may change their class.
_BOUND_OF_SCORES = 1e-3
# Where sums are added in another order, rounding errors grow: from this many steps
# after a checkpoint on, only gross differences are detected (docs/auditing.md).
_STEPS_OF_BOUND = 20
_BOUNDS = BOUNDS | {"float16": 0.1, "bfloat16": 0.1}  # Those of one step are 0.05.
_LATER_BOUND = 0.5
# A gradient's norm this many times the median of the steps before it is a jump.
_JUMP = 5.0
_STEPS_OF_MEDIAN = 50


class Difference(NamedTuple):
    """How far a recomputed step is from the run's records of it."""

    step: int
    place: str  # Where the run has it: `log`, `checkpoint` or `scores`.
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
        logged: The lines that the run has logged, by step.
        saved: The steps of its checkpoints.
        training: The assembled training.
        step: The step reached.
        bound: The largest difference that rounding explains. It is 0 where bitwise
            equality is to be expected, on the same kind of machine.

    Raises:
        UsageError: The run's data or model has changed, or its images cannot be divided
            among this number of towers.
    """

    def __init__(
        self, run: Path, towers: int | None = None, data_dir: str | None = None
    ) -> None:
        self.run = run
        self.recorded = recorded = run_config.read_run_config(run)
        self._directory = run / layout.CHECKPOINTS
        self.saved = checkpoints.steps(self._directory)
        lines = logs.read_steps(run / layout.METRICS)
        self.logged = {line["step"]: line for line in lines}
        self.training = training = _assemble(run, recorded, towers, data_dir)
        is_exact = training.config.speed.deterministic and all(
            recorded.get(name) == training.settings[name]
            for name in ("workers", "devices")
        )
        self.bound = 0.0 if is_exact else _BOUNDS[recorded["precision"]]
        self.step = 0
        self._state = training.towers.state
        self._stage: Any = None
        self._initial = self._values()
        links = chain.manifests(run)
        # The batches that rollbacks have left out before a checkpoint, by its step.
        left_out = {step: link.get("left_out", 0) for step, link in links.items()}
        self._left_out = {0: 0, **left_out}

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
        newest, refused = restoring.restore_newest(
            self._directory,
            lambda found: checkpoints.restore(found, self._state.trackables()),
            self.recorded,
            skip=[at for at in self.saved if at >= step],
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
        self.step = newest.step if newest else 0
        self._state.halted.assign(False)
        say(f"From step {self.step:,} on, {self.training.placement.description}")

    def batches_to(self, last: int) -> Iterator[Sequence[Batch]]:
        """Yields the batches of each step up to `last`, for `advance`."""
        training = self.training
        if last > (most := training.config.run.max_steps):
            raise UsageError(
                f"The run has step {last:,}, and its {layout.CONFIG} says max_steps is "
                f"{most:,}: what was computed after is unknown.\nRestore max_steps."
            )
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

        It ends with the first difference that rounding does not explain. `before` is
        called with the batches of each of these steps before its update.
        """
        self.go_before(first)
        for batches in self.batches_to(last):
            if self.step + 1 < first:
                self.advance(batches)
                continue
            before(batches)
            for one in self._differences(self.advance(batches)):
                yield one
                if one.largest > one.bound:
                    return

    def _differences(self, metrics: Mapping[str, float]) -> Iterator[Difference]:
        """Compares the step reached, and its metrics, with the run's records of it.

        The replay goes on from the run's checkpoint, if there is one.
        """
        begun = max(at for at in (0, *self.saved) if at < self.step)
        is_near = self.step - begun <= _STEPS_OF_BOUND
        bound = self.bound if is_near or not self.bound else _LATER_BOUND
        if line := self.logged.get(self.step):
            yield self._difference("log", bound, _numbers(_LOGGED, metrics, line))
        if self.step in self.saved:
            ours, model = self._values(), self._state.model
            try:
                found = checkpoints.verify(self._directory, self.step)
                checkpoints.restore(found, self._state.trackables())
            except checkpoints.DamagedError as error:
                yield Difference(self.step, "checkpoint", 2.0, str(error), bound)
                return
            kept = (*model.trainable_variables, *model.non_trainable_variables)
            names = [one.path for one in (*kept, *self._state.optimizer.variables)]
            named = zip_longest(names, ours, self._values(), fillvalue="an average")
            yield self._difference("checkpoint", bound, named)
        for recorded, scored in self._scored:
            if line := recorded.get(self.step):
                towers = self.training.towers
                result = scored.score(towers.state.averages, towers.devices[0])
                pairs = _numbers(_SCORES, result.scalars, line)
                yield self._difference("scores", max(bound, _BOUND_OF_SCORES), pairs)

    def _difference(self, place: str, bound: float, pairs: Iterable) -> Difference:
        found = [(proportion(ours, theirs), name) for name, ours, theirs in pairs]
        largest, name = max(found, default=(0.0, ""))
        return Difference(self.step, place, largest, name, bound)

    @functools.cached_property
    def _scored(self) -> list[tuple[dict[int, dict], ScoredSet]]:
        """The recorded scores of the run on each part, and the set that was scored."""
        found = []
        for part in _PARTS:
            log = self.run / layout.evaluation_events(part) / layout.METRICS
            recorded = scores.comparable(logs.read_lines(log))
            if recorded:
                count = max(line["num_examples"] for line in recorded.values())
                found.append((recorded, scored_set(self.training, part, count)))
        return found

    def find_jump(self, first: int, last: int) -> tuple[float, Sequence[Batch]] | None:
        """Goes to the state before the first step whose gradient jumps.

        Returns the gradient's norm and the step's batches; None if there is no such
        step from `first` to `last`.
        """
        self.go_before(first)
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

    def heaviest(
        self, batches: Sequence[Batch], most: int
    ) -> list[tuple[str, float, float]]:
        """Finds images whose gradients are the largest, by halving the batch.

        Returns name, norm of the gradient and cross entropy of each.
        """
        images, labels = (tf.concat(parts, 0) for parts in zip(*batches, strict=True))

        def norm(places: np.ndarray) -> float:
            taken = tf.gather(images, places), tf.gather(labels, places)
            gradients = self.training.towers.tower(self._state, 0, *taken).gradients
            found = tf.linalg.global_norm([one for one in gradients if one is not None])
            return float(found) if np.isfinite(found) else np.inf

        described, left = self.describe(batches), np.arange(len(images))
        found: list[tuple[str, float, float]] = []
        while len(left) and len(found) < most:
            part = left
            while len(part) > 1:
                part = max(np.array_split(part, 2), key=norm)
            name, _, loss = described[part[0]]
            found.append((name, norm(part), loss))
            left = np.setdiff1d(left, part)
        return found

    def describe(self, batches: Sequence[Batch]) -> list[tuple[str, str, float]]:
        """Returns name, class and cross entropy of each image of the next step."""
        training, size = self.training, self.training.config.global_batch_size
        count, first = len(training.images), self.batch * size
        positions = tf.range(first, first + size, dtype=tf.int64)
        seed = training.config.run.seed
        chosen = shuffled_indices(positions, count, seed).numpy().tolist()
        model, loss = self._state.model, training.towers.tower.loss
        trained = [variable.value for variable in model.trainable_variables]
        others = [variable.value for variable in model.non_trainable_variables]
        losses: list[float] = []
        for images, labels in batches:
            logits, *_ = models.inference(model, trained, others, images, training=True)
            for at in range(len(images)):
                one = loss(logits[at : at + 1], labels[at : at + 1], [])
                losses.append(float(one["cross_entropy"]))
        names = names_of(training.dataset, "train", count)
        classes = [training.dataset.class_names[at] for at in training.labels[chosen]]
        return [*zip((names[at] for at in chosen), classes, losses, strict=True)]

    def _values(self) -> list[tf.Tensor]:
        return [variable.read_value() for variable in self._state.variables()]

    def _assign(self, values: Sequence[Any]) -> None:
        for variable, value in zip(self._state.variables(), values, strict=True):
            variable.assign(value)


def _assemble(
    run: Path, recorded: Mapping[str, Any], towers: int | None, data_dir: str | None
) -> Training:
    """Assembles the training of a run; refuses if it would be another training."""
    size, batches = recorded["global_batch_size"], recorded["towers"]
    batches *= recorded["accumulate"]
    towers = towers or max(1, recorded["towers"])
    # As many batches as the run had, so that each has the same images. Only a model
    # without batch norm and dropout may have another number.
    divides = batches % towers == 0
    parts = counted(batches, "batch", "batches")
    impossible = UsageError(
        f"--num_gpus {towers}: {towers} towers cannot share a step of the run, {parts} "
        f"with {size:,} images in all.\nTheir number has to divide {batches}; only in "
        "a model without batch norm and dropout, which depend on\nthe images of a "
        f"batch, may it divide {size:,} instead."
    )
    if not divides and size % towers:
        raise impossible
    values = run_config.config_to_resume(str(run), {"model": recorded["model"]})
    values |= {
        "num_gpus": towers,
        "accumulate": batches // towers if divides else 1,
        "global_batch_size": size,
        "split_gpu": 1,
        "variable_update": "towers",
        "data_dir": data_dir or recorded["data_dir"],
    }
    training = assemble(Config.from_values(values))
    found = starting.find_differences(run, recorded, training.determining())
    if not divides and "batch_size" in found:
        raise impossible
    if found:
        changed = (
            f"{name} was {old!r}, now {new!r}" for name, (old, new) in found.items()
        )
        raise UsageError(
            f"The run was trained on something else: {'; '.join(changed)}.\nRestore "
            "that; if the data has moved, give its place as --data_dir."
        )
    return training


def _numbers(
    names: Iterable[str], ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Iterator[tuple[str, float, float]]:
    """Yields the names that both have, with both values."""
    for name in set(names).intersection(ours, theirs):
        yield name, _as_logged(ours[name]), _as_logged(theirs[name])


def _as_logged(value: Any) -> float:
    """Returns a metric as a log holds it; NaN in place of values that it cannot."""
    return value if isinstance(value, float) and np.isfinite(value) else np.nan
