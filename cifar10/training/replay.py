"""Recomputes steps of a run, and compares them with the run's records.

The order of the images, the distortions and the dropout masks depend only on seed and
step, and the number of towers affects only rounding. So every step can be recomputed
from the checkpoint before it. Nothing is written to the run's directory.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from cifar10.config import layout, run_config
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.input.pipeline import shuffled_indices
from cifar10.input.regrouping import names_of
from cifar10.run_directory import checkpoints, logs, scores, starting
from cifar10.towers.rounding import ROUNDING, relative_difference
from cifar10.towers.towers import Batch
from cifar10.training.assembly import assemble
from cifar10.training.periodic import scored_set

# Not the precision: rounding may move it by a whole image.
_COMPARED = ("total_loss", "cross_entropy", "learning_rate", "gradient_norm")
# How far rounding moves losses and weights, ten times the difference after 20 steps
# (docs/auditing.md); less in 16 bits, where it would be any two trainings.
_BOUNDS = {"float64": 1e-12, "float32": 0.5, "bfloat16": 0.8, "float16": 0.8}
# Whether a value is farther from the run's record than rounding explains, how far, that
# bound, the step and the place. The largest tuple is the worst difference.
Difference: TypeAlias = "tuple[bool, float, float, int, str]"


class Replay:
    """Recomputes any steps of a run; refuses one whose data or model has changed.

    Attributes:
        run: The run's directory.
        recorded: The content of its `config.json`.
        saved: The steps of its checkpoints.
        begun: The first step from which the run can be recomputed.
        step: The step that was restored or computed last.
    """

    def __init__(
        self, run: Path, towers: int | None = None, data_dir: str | None = None
    ) -> None:
        self.run = run
        self.recorded = recorded = run_config.read_run_config(run)
        lines = logs.read_steps(run / layout.METRICS)
        self._logged = {line["step"]: line for line in lines}
        self._directory, most = run / layout.CHECKPOINTS, recorded["max_steps"]
        self.saved = [at for at in checkpoints.steps(self._directory) if at <= most]
        has_weights = recorded.get("initial_weights")
        self.begun = min(self.saved, default=most) if has_weights else 0
        batches = recorded.get("towers", 1) * recorded.get("accumulate", 1)
        towers = towers or max(1, recorded.get("towers", 1))
        values = run_config.config_to_resume(str(run), {"model": recorded["model"]})
        values |= {"num_gpus": towers, "split_gpu": 1, "variable_update": "towers"}
        # The run's batches, if possible: batch norm and dropout depend on them.
        values["accumulate"] = max(1, batches // towers)
        values["data_dir"] = data_dir or recorded["data_dir"]
        self._training = training = assemble(Config.from_values(values))
        if changed := starting.find_differences(run, recorded, training.determining()):
            raise UsageError(
                f"{run} was trained differently (old, new): {changed}.\nRestore these "
                "values, or give another --num_gpus or --data_dir."
            )
        where = ("workers", "devices")  # The same to the bit on the same alone.
        same = [recorded.get(name) == training.settings[name] for name in where]
        is_exact = training.config.speed.deterministic and all(same)
        self._precision = training.config.network.precision
        self._bound = 0.0 if is_exact else _BOUNDS[self._precision]
        self.step = 0
        self._state = training.towers.state
        self._initial = [(one, one.read_value()) for one in self._state.variables()]

    def steps(self, first: int, last: int) -> Iterator[Sequence[Batch]]:
        """Yields each step's batches before the step; pass them to `advance`."""
        training = self._training
        self._restore(max((at for at in self.saved if at < first), default=0))
        while self.step < last:
            stage = training.config.stage(self.step)
            if training.towers.tower.frozen != stage.frozen:
                training.towers.freeze(stage.frozen)
            end = min(last, stage.end, *(at for at in self.saved if at > self.step))
            with training.open_batches(self._batch, self.step) as queues:
                while self.step < end:
                    batches = queues.get()
                    if self.step + 1 < first:
                        self.advance(batches)
                    else:
                        yield batches

    def advance(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Computes the next step; returns its metrics, each finite or infinity."""
        metrics = self._training.towers.step(batches).metrics
        self.step += 1
        found = {name: float(metrics[name]) for name in _COMPARED}
        return {name: of if np.isfinite(of) else np.inf for name, of in found.items()}

    def compare(self, batches: Sequence[Batch]) -> Iterator[Difference]:
        """Computes the next step; compares it with its log line and its checkpoint.

        The replay goes on from the checkpoint, whose scores are compared too.
        """
        metrics, line = self.advance(batches), self._logged.get(self.step, {})
        if bound := self._bound:
            del metrics["gradient_norm"]  # It soon differs by its size.
        records = [(metrics, line, bound, layout.METRICS)]
        if self.step in self.saved:
            ours = self._values()
            self._restore(self.step)
            far = max(map(relative_difference, ours, self._values()))
            yield far > bound, far, bound, self.step, "checkpoint"
            records += self._scores()
        for found, line, bound, log in records:
            for name in found.keys() & line.keys():
                logged = line[name] if isinstance(line[name], float) else np.inf
                far = relative_difference(found[name], logged)
                yield far > bound, far, bound, self.step, f"{name} in {log}"

    def find(self, first: int, last: int) -> tuple[int, float, float]:
        """Finds the step in which loss or gradient norm rises most, in one pass.

        A rise is relative to the highest of the three steps before. The first step that
        is not finite rises most. Returns step, cross entropy and gradient norm.
        """
        found: list[tuple[float, float]] = []
        rises: dict[int, float] = {}  # NaN if a step before was not finite either.
        for batches in self.steps(max(self.begun + 1, first - 3), last):
            metrics = self.advance(batches)
            found.append((metrics["cross_entropy"], metrics["gradient_norm"]))
            if self.step >= first:
                both = zip(found[-1], *(found[-4:-1] or found), strict=True)
                rises[self.step] = max(now / max(1e-30, *old) for now, *old in both)
        step = max(rises, key=rises.__getitem__)
        return step, *found[step - self.step - 1]

    def images(self, batches: Sequence[Batch]) -> list[tuple]:
        """Computes each image of the next step, given its `batches`, as a batch alone.

        Returns (gradient norm, cross entropy, name, PNG before distortion) for each.
        """
        training, found = self._training, []
        size, count = training.config.global_batch_size, len(training.images)
        positions = self._batch * size + tf.range(size, dtype=tf.int64)
        chosen = shuffled_indices(positions, count, training.config.run.seed).numpy()
        names = names_of(training.dataset, "train", count)
        images, labels = (tf.concat(parts, 0) for parts in zip(*batches, strict=True))
        for at, picture in enumerate(training.images[chosen]):
            one = images[at : at + 1], labels[at : at + 1]
            result = training.towers.tower(self._state, 0, *one)
            norm = float(tf.linalg.global_norm(result.gradients))
            norm = norm if np.isfinite(norm) else np.inf
            loss = float(result.metrics["cross_entropy"])
            png = tf.io.encode_png(picture).numpy()
            found.append((norm, loss, names[chosen[at]], png))
        return found

    @property
    def _batch(self) -> int:
        """The number of the next input batch; rollbacks have left out earlier ones."""
        saved = [at for at in self.saved if at > self.step] or self.saved[-1:]
        manifests = [checkpoints.read_manifest(self._directory, at) for at in saved[:1]]
        return self.step + sum(one.get("left_out", 0) for one in manifests)

    def _scores(self) -> Iterator[tuple[dict[str, float], dict, float, str]]:
        """Scores the restored checkpoint; yields scores, log line, bound, log."""
        towers = self._training.towers
        for part in ("test", "val"):
            log = f"{layout.evaluation_events(part)}/{layout.METRICS}"
            entries = logs.read_lines(self.run / log)
            if line := scores.comparable(entries).get(self.step):
                scored = scored_set(self._training, part, line["num_examples"])
                found = scored.score(towers.state.averages, towers.devices[0])
                yield found.scalars, line, ROUNDING[self._precision], log

    def _restore(self, step: int) -> None:
        """Restores the checkpoint of a step; without one, the initial values."""
        if step in self.saved:
            found = checkpoints.verify(self._directory, step)
            checkpoints.restore(found, self._state.trackables())
        else:
            for variable, value in self._initial:
                variable.assign(value)
        self._state.halted.assign(False)
        self.step = step

    def _values(self) -> list[np.ndarray]:
        """Returns what is compared: each variable, or all weights as a single one."""
        if self._bound:
            weights = self._state.model.trainable_variables
            return [np.concatenate([np.ravel(weight) for weight in weights])]
        return [variable.numpy() for variable in self._state.variables()]
