"""Recomputes steps of a run, and compares them with the run's records.

The order of the images, the distortions and the dropout masks depend only on seed and
step, and the number of towers affects only rounding. So every step can be recomputed
from the checkpoint before it. Nothing is written to the run's directory.
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

# The metrics to compare in lines of the log and in scores. A step's precision is left
# out: one prediction that changes moves it by far more than rounding does.
_LOGGED = ("total_loss", "cross_entropy", "gradient_norm", "learning_rate")
_SCORES = ("precision @ 1", "cross_entropy")
_PARTS: tuple[Literal["val", "test"], ...] = ("val", "test")
# Another processor rounds differently, which may change the class of a few images.
_BOUND_OF_SCORES = 1e-3
# Rounding errors grow with each step: more than this many steps after a checkpoint,
# only large differences are detected (docs/auditing.md).
_STEPS_OF_BOUND = 20
_BOUNDS = BOUNDS | {"float16": 0.1, "bfloat16": 0.1}  # For one step: 0.05.
_LATER_BOUND = 0.5
# A gradient's norm this many times the median of the steps before it is a jump.
_JUMP = 5.0
_STEPS_OF_MEDIAN = 50


class Difference(NamedTuple):
    """How much a recomputed step differs from one of the run's records."""

    step: int
    place: str  # The kind of record: `log`, `checkpoint` or `scores`.
    largest: float  # The largest relative difference; 0 if all bits are equal.
    name: str  # The metric or variable that differs most, or what is damaged.
    bound: float  # The largest difference that rounding explains.


class Replay:
    """Recomputes any step of a run from the checkpoint before that step.

    Args:
        run: The run's directory.
        towers: The number of towers; None for as many as the run had.
        data_dir: The directory of the data; None for the one that the run used.

    Attributes:
        run: The run's directory.
        recorded: The content of the run's `config.json`.
        logged: The lines of the run's log, by step.
        saved: The steps of the run's checkpoints.
        training: The run's training, assembled again from its `config.json`.
        step: The step that was restored or computed last.
        bound: The largest difference that rounding explains; 0 for a deterministic run
            that is replayed on as many workers as it had and on the same devices.

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
        # How many batches rollbacks had left out before each checkpoint, by its step.
        left_out = {step: link.get("left_out", 0) for step, link in links.items()}
        self._left_out = {0: 0, **left_out}

    @property
    def batch(self) -> int:
        """The number of the next input batch, counted from 0."""
        later = [step for step in self._left_out if step > self.step]
        return self.step + self._left_out[min(later, default=max(self._left_out))]

    def go_before(self, step: int) -> None:
        """Restores the newest intact checkpoint before a step, or the initial values.

        Raises:
            UsageError: No checkpoint is found, and the run had `--initial_weights`.
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
                    f"No checkpoint before step {step} can be used, and a replay "
                    f"cannot start from the initial weights {weights}.\n"
                    "Give only steps after a checkpoint."
                )
            self._assign(self._initial)
        self.step = newest.step if newest else 0
        self._state.halted.assign(False)
        say(f"Replaying from step {self.step:,}: {self.training.placement.description}")

    def batches_to(self, last: int) -> Iterator[Sequence[Batch]]:
        """Yields the batches of each step up to `last`; pass them to `advance`."""
        training = self.training
        if last > (most := training.config.run.max_steps):
            raise UsageError(
                f"Step {last:,} is beyond max_steps, {most:,}, in the run's "
                f"{layout.CONFIG}.\nRestore the max_steps with which the run trained."
            )
        while self.step < last:
            stage = training.config.stage(self.step)
            if stage != self._stage:
                self._stage = stage
                training.towers.freeze(stage.frozen)
            # Batches are opened anew where a rollback may have left some out.
            end = min(last, stage.end, *(at for at in self._left_out if at > self.step))
            with training.open_batches(self.batch, self.step) as queues:
                while self.step < end:
                    yield queues.get()

    def advance(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Computes the next step, and returns its metrics."""
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
        """Recomputes steps `first` to `last`, and compares them with the run's records.

        Yields a `Difference` for each record, up to the first that rounding does not
        explain. Before each of these steps, calls `before` with the step's batches.
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
        """Yields a `Difference` for each of the run's records of the replayed step.

        If that step has a checkpoint, restores it, so that the replay goes on from it.
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
        """The recorded scores by step, and the `ScoredSet`, of each scored split."""
        found = []
        for part in _PARTS:
            log = self.run / layout.evaluation_events(part) / layout.METRICS
            recorded = scores.comparable(logs.read_lines(log))
            if recorded:
                count = max(line["num_examples"] for line in recorded.values())
                found.append((recorded, scored_set(self.training, part, count)))
        return found

    def find_jump(self, first: int, last: int) -> tuple[float, Sequence[Batch]] | None:
        """Finds the first step whose gradient norm jumps; restores the state before it.

        Returns that step's gradient norm and batches; None if no norm jumps.
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
        """Finds up to `most` images with the largest gradients, by halving the batch.

        Returns the name, gradient norm and cross entropy of each of these images.
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
        """Returns the name, class and cross entropy of each image of the next step."""
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
    """Assembles a run's training again; refuses changed data, settings or batches."""
    size, batches = recorded["global_batch_size"], recorded["towers"]
    batches *= recorded["accumulate"]
    towers = towers or max(1, recorded["towers"])
    # Each batch has to have the same images as in the run. Only a model without batch
    # norm and dropout may divide a step's images differently.
    divides = batches % towers == 0
    parts = counted(batches, "batch", "batches")
    impossible = UsageError(
        f"--num_gpus {towers}: {towers} towers cannot share a step evenly. Each step "
        f"has {parts}, {size:,} images in all.\nGive a number that divides {batches}, "
        "or, for a model without batch norm and dropout, one that\n"
        f"divides {size:,}."
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
            f"The run was trained differently: {'; '.join(changed)}.\nRestore these "
            "values; if the data has moved, give its new directory as --data_dir."
        )
    return training


def _numbers(
    names: Iterable[str], ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Iterator[tuple[str, float, float]]:
    """Yields (name, value in `ours`, value in `theirs`) for `names` that both have."""
    for name in set(names).intersection(ours, theirs):
        yield name, _as_logged(ours[name]), _as_logged(theirs[name])


def _as_logged(value: Any) -> float:
    """Returns a metric, or NaN if it is not finite or was logged as null."""
    return value if isinstance(value, float) and np.isfinite(value) else np.nan
