"""Recomputes steps of a run, and compares them with the run's records.

The order of the images, the distortions and the dropout masks depend only on seed and
step, and the number of towers affects only rounding. So every step can be recomputed
from the checkpoint before it. Nothing is written to the run's directory.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from cifar10.config import layout, run_config
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.input.corrections import names_of
from cifar10.input.pipeline import shuffled_indices
from cifar10.run_directory import checkpoints, logs, starting
from cifar10.towers.towers import Batch
from cifar10.towers.verification import relative_difference
from cifar10.training.assembly import assemble

# A step's precision is not compared: one prediction that changes moves it by far more
# than rounding does.
_COMPARED = ("total_loss", "cross_entropy", "gradient_norm", "learning_rate")
# Differences by rounding grow with each step: in the tutorial's network, from 1e-7 to
# 0.1 of a gradient's norm within 40 steps.
_BOUND = 0.5


class Replay:
    """Recomputes any steps of a run.

    Args:
        run: The run's directory.
        towers: The number of towers; None for as many as the run had.
        data_dir: The directory of the data; None for the one that the run used.

    Attributes:
        run: The run's directory.
        recorded: The content of its `config.json`.
        saved: The steps of its checkpoints.
        begun: The first step from which the run can be recomputed.
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
        lines = logs.read_steps(run / layout.METRICS)
        self._logged = {line["step"]: line for line in lines}
        self._directory, most = run / layout.CHECKPOINTS, recorded["max_steps"]
        self.saved = [at for at in checkpoints.steps(self._directory) if at <= most]
        has_weights = bool(recorded.get("initial_weights"))
        self.begun = min(self.saved, default=most) if has_weights else 0
        recorded_towers = recorded.get("towers", 1)
        batches = recorded_towers * recorded.get("accumulate", 1)
        towers = towers or max(1, recorded_towers)
        values = run_config.config_to_resume(str(run), {"model": recorded["model"]})
        values |= {
            "num_gpus": towers,
            # The run's batches, if possible: batch norm and dropout depend on them.
            "accumulate": max(1, batches // towers),
            "global_batch_size": recorded["global_batch_size"],
            "split_gpu": 1,
            "variable_update": "towers",
            "data_dir": data_dir or recorded["data_dir"],
        }
        self._training = training = assemble(Config.from_values(values))
        changed = starting.find_differences(run, recorded, training.determining())
        if changed:
            raise UsageError(
                f"{run} was trained differently (old, new): {changed}.\nRestore these "
                "values, or give another --num_gpus or --data_dir."
            )
        is_exact = training.config.speed.deterministic and all(
            recorded.get(name) == training.settings[name]
            for name in ("workers", "devices")
        )
        self.bound = 0.0 if is_exact else _BOUND
        self.step = 0
        self._state = training.towers.state
        self._initial = self._values()

    def steps(self, first: int, last: int) -> Iterator[Sequence[Batch]]:
        """Yields the batches of steps `first` to `last`; pass each to `advance`.

        Meanwhile, the variables have their values from before the step.
        """
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

    def compare(self, batches: Sequence[Batch]) -> Iterator[tuple[float, int, str]]:
        """Computes the next step; compares it with its log line and its checkpoint.

        Yields (relative difference, step, metric or "checkpoint") for each record. The
        replay goes on from the checkpoint.
        """
        metrics, line = self.advance(batches), self._logged.get(self.step, {})
        for name in metrics.keys() & line.keys():
            logged = line[name] if isinstance(line[name], float) else np.inf
            yield relative_difference(metrics[name], logged), self.step, name
        if self.step in self.saved:
            ours = self._values()
            self._restore(self.step)
            largest = max(map(relative_difference, ours, self._values()))
            yield largest, self.step, "checkpoint"

    def images(self, batches: Sequence[Batch]) -> list[tuple]:
        """Computes each image of the next step, given its `batches`, as a batch alone.

        Returns (gradient norm, cross entropy, name, undistorted image) for each.
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
            gradients = [of for of in result.gradients if of is not None]
            norm = float(tf.linalg.global_norm(gradients))
            norm = norm if np.isfinite(norm) else np.inf
            loss = float(result.metrics["cross_entropy"])
            found.append((norm, loss, names[chosen[at]], picture))
        return found

    @property
    def _batch(self) -> int:
        """The number of the next input batch; rollbacks have left out earlier ones."""
        saved = [at for at in self.saved if at > self.step] or self.saved[-1:]
        manifests = [checkpoints.read_manifest(self._directory, at) for at in saved[:1]]
        return self.step + sum(one.get("left_out", 0) for one in manifests)

    def _restore(self, step: int) -> None:
        """Restores the checkpoint of a step; without one, the initial values."""
        if step in self.saved:
            found = checkpoints.verify(self._directory, step)
            checkpoints.restore(found, self._state.trackables())
        else:
            both = zip(self._state.variables(), self._initial, strict=True)
            for variable, value in both:
                variable.assign(value)
        self._state.halted.assign(False)
        self.step = step

    def _values(self) -> list[tf.Tensor]:
        return [variable.read_value() for variable in self._state.variables()]
