"""Recomputes steps of a run, and compares them with the run's records.

The order of the images, the distortions and the dropout masks depend only on seed and
step, and the number of towers affects only rounding. So every step can be recomputed
from the checkpoint before it. Nothing is written to the run's directory.
"""

import collections
import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from cifar10.config import layout, run_config
from cifar10.config.config import Config
from cifar10.config.options import is_a
from cifar10.errors import UsageError
from cifar10.input.pipeline import shuffled_indices
from cifar10.input.regrouping import names_of
from cifar10.models.step_metrics import PRECISION, STEP_METRICS
from cifar10.run_directory import checkpoints, logs, scores, starting, temperature
from cifar10.run_directory.averages import LOST, average
from cifar10.towers import noise_scale, schedule
from cifar10.towers.copies import widened
from cifar10.towers.graphs import split_numbers
from cifar10.towers.rounding import ROUNDING, relative_difference
from cifar10.towers.towers import Batch
from cifar10.training.assembly import assemble
from cifar10.training.periodic import scored_set

# How far rounding moves losses and weights: ten times the difference after 20 steps
# (docs/auditing.md); less in 16 bits, where that bound would admit any run.
_BOUNDS = {"float64": 1e-12, "float32": 0.5, "bfloat16": 0.8, "float16": 0.8}
# For batch statistics and the norm of an optimizer's slots: a factor of up to 5.
_OF_STATE = 0.8
_FAR = 1e308  # NaN, larger numbers and other types count as infinity.
# Rounding may change these entirely, so they are compared only if the replay is exact.
_BY_THEIR_SIZE = ("gradient_norm", "loss_scale")
# Parts of the names of values that are compared by difference, because they may be 0.
_SHARES = (LOST, *(name for name, one in STEP_METRICS.items() if one.is_share))
# Entries of config.json that follow from the data and the model.
FACTS = (
    *("class_names", "classes", "parameters", "image_shape", "data_is_real"),
    *("data_parts", "data_division", "data_sample", "data_uncorrected"),
    *("global_batch_size", "max_steps"),
)
# Whether a value is farther from the run's record than rounding explains, how far, that
# bound, the step and the place. The largest tuple is the worst difference.
Difference: TypeAlias = "tuple[bool, float, float, int, str]"


class Replay:
    """Recomputes any steps of a run; refuses one whose data or model has changed.

    Attributes:
        run: The run's directory.
        recorded: What its `config.json` records.
        training: The training that recomputes it, which has the run's data set.
        names: The names of the training pictures.
        logged: The lines of its log, by step.
        scored: The scores that commands show of it, by split.
        saved: The steps of its checkpoints.
        manifests: Their manifests, by step.
        links: The links of these, by step.
        origin: The first step from which the run can be recomputed.
        determining: The names of the settings that the replay has taken from the run.
        facts: `FACTS` as the data and the model give them here.
        why_not_exact: Why the run is not compared bit for bit; empty if it is.
        bound: How far losses and weights may be from the run's.
        unread: Names of values in logs that were not recomputed, by the log's path.
        step: The step that was restored or computed last.
    """

    def __init__(
        self, run: Path, towers: int | None = None, data_dir: str | None = None
    ) -> None:
        self.run = run
        self.recorded = recorded = run_config.RecordedRun.read(run)
        self.logged = {of["step"]: of for of in logs.read_steps(run / layout.METRICS)}
        self.scored = {
            split: scores.full_evaluations(logs.read_lines(run / scores.log_of(split)))
            for split in ("test", "val")
        }
        self._directory = run / layout.CHECKPOINTS
        self.saved = checkpoints.steps(self._directory)
        self.manifests = {}
        for step in self.saved:
            with contextlib.suppress(UsageError, FileNotFoundError):  # It is damaged.
                self.manifests[step] = checkpoints.read_manifest(self._directory, step)
        config = recorded.config
        weights = config.fine_tuning.initial_weights
        self.origin = min(self.saved, default=config.run.max_steps) if weights else 0
        values = _settings(recorded, towers, data_dir)
        records = (*self.logged.values(), *self.manifests.values())
        if any(record.get("skipped_steps") for record in records):
            values["on_nan"] = "skip"  # Else the replay would halt there.
        self.training = training = assemble(Config.from_values(values))
        self.names = names_of(training.dataset, "train", len(training.images))
        determining = training.determining()
        if changed := starting.find_differences(recorded, determining):
            raise UsageError(
                f"{run} was trained differently (old, new): {changed}.\nRestore these "
                "values, or give another --num_gpus or --data_dir."
            )
        recorded.check_logits(training.run.facts.model_logits)
        self.determining = {*determining}
        self.facts = {name: training.run.entries[name] for name in FACTS}
        self._precision = training.config.network.precision
        self.links = {at: checkpoints.link_of(of) for at, of in self.manifests.items()}
        # An earlier version, which kept no starts, may have logged less before.
        starts = starting.read_starts(run)
        self._starts = [start["step"] for start in starts]
        self._first_start = next(iter(self._starts), np.inf)
        # The sessions that log skipped steps: --on_nan may change at a resume.
        lines = [at for at, line in self.logged.items() if "skipped_steps" in line]
        self._skipping = {*map(self._session, lines)}
        if config.checkpoints.on_nan == "skip":
            self._skipping.add(len(self._starts) - 1)
        self.why_not_exact = self._why_not_exact(starts)
        self.bound = _BOUNDS[self._precision] if self.why_not_exact else 0.0
        self.unread = collections.defaultdict[str, set[str]](set)
        self._scored_set = functools.cache(functools.partial(scored_set, training))
        self.step = 0
        self._state = training.towers.state
        self._initial = [(one, one.read_value()) for one in self._state.variables()]

    def _session(self, step: int) -> int:
        """Returns the number of the session that computed a step; -1 if unknown."""
        return max((n for n, at in enumerate(self._starts) if at < step), default=-1)

    def _why_not_exact(self, starts: Sequence[Mapping[str, Any]]) -> str:
        now = self.training.run
        if not now.config.speed.deterministic:
            return "because the run was not --deterministic"
        places = {f"the chain at step {at}": link for at, link in self.links.items()}
        places = {place: link.get("settings", {}) for place, link in places.items()}
        here = _machine(now.values)
        recorded = {layout.CONFIG: dict(self.recorded.entries)}
        recorded |= {f"the start at step {one['step']}": {**one} for one in starts}
        if 0 < self._first_start < np.inf:  # Another machine may have begun the run.
            recorded[f"the steps before {self._first_start}"] = {"versions": {}}
        for place, found in (recorded | places).items():
            there = _machine({**now.values, **found})
            for name in [name for name in there if there[name] != here.get(name)]:
                was, now_is = (one.get(name) or "unknown" for one in (there, here))
                return f"because {name} in {place} is {was}, but {now_is} here"
        return ""

    def is_recorded(self, first: int, last: int) -> bool:
        """Returns whether a step has a line in the log, a checkpoint or scores."""
        scored = [line["step"] for lines in self.scored.values() for line in lines]
        return any(first <= at <= last for at in (*self.logged, *self.saved, *scored))

    def steps(self, first: int, last: int) -> Iterator[Sequence[Batch]]:
        """Yields each step's batches, to be passed to `advance` or `compare`."""
        self._restore(max((at for at in self.saved if at < first), default=0))
        yield from self.onward(first, last)

    def onward(self, first: int, last: int) -> Iterator[Sequence[Batch]]:
        """Yields the same as `steps`, but continues from the current state."""
        training = self.training
        while self.step < last:
            stage = training.config.stage(self.step)
            if training.towers.tower.frozen != stage.frozen:
                training.towers.freeze(stage.frozen)
            end, left_out = min(last, stage.end), self._batch - self.step
            with training.open_batches(self._batch, self.step) as queues:
                while self.step < end and left_out == self._batch - self.step:
                    batches = queues.get()
                    if self.step + 1 < first:
                        self.advance(batches)
                    else:
                        yield batches

    def advance(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Computes the next step; returns what the run logs."""
        config, result = self.training.config, self.training.towers.step(batches)
        decay = schedule.average_decay(config.update.moving_average_decay, self.step)
        self._share *= float(decay)
        self.step += 1
        (found,), losses = split_numbers(result.numbers.numpy(), result.metrics)
        found.pop(noise_scale.SQUARE, None)
        if np.isfinite([*losses.flat, found["gradient_norm"]]).all():
            average(self._averages, found, self.training.dataset.classes)
        else:
            self._skipped += 1
        if self._has_averages:
            names = self._averages.keys() & STEP_METRICS.keys()
            found |= {f"{name}/average": self._averages[name] for name in names}
        if self._session(self.step) in self._skipping:
            found["skipped_steps"] = self._skipped
        return found

    def compare(self, batches: Sequence[Batch]) -> Iterator[Difference]:
        """Compares the next step with the run's; goes on from a checkpoint, if any."""
        if self.step == self.origin:
            # Without others' weights, a checkpoint of step 0 has the initial values.
            if not self.recorded.config.fine_tuning.initial_weights:
                self._restore(0, anew=True)
                if 0 in self.saved:
                    yield from self._compare_checkpoint()
            yield from self._compare_scores()
        yield from self._compare_line(self.advance(batches))
        if self.step in self.saved:
            yield from self._compare_checkpoint()
        yield from self._compare_scores()

    def _compare_line(self, found: Mapping[str, float]) -> Iterator[Difference]:
        """Compares what a step's line in the run's log would hold, if it has one."""
        if line := self.logged.get(self.step):
            yield from self._differences(found, line, self.bound, layout.METRICS)

    def _differences(
        self,
        found: Mapping[str, float],
        line: dict[str, Any],
        bound: float,
        log: str,
        of_shares: float = np.inf,
    ) -> Iterator[Difference]:
        """Compares recomputed values with a line, which must contain all of them."""
        if self.bound:
            found = {name: found[name] for name in found if name not in _BY_THEIR_SIZE}
        self.unread[log] |= line.keys() - found.keys() - {"step"}
        is_of_starts = self.step > self._first_start or not self._first_start
        lacks = found.keys() - line.keys() if is_of_starts else set()
        if lacks or not found.keys() & line.keys():
            yield True, 2.0, bound, self.step, f"{', '.join(sorted(lacks))} in {log}"
        for name in found.keys() & line.keys():
            ours, logged = _number(found[name]), _number(line[name])
            allowed = min(bound, 1e-6) if name == "learning_rate" else bound
            far = relative_difference(ours, logged)
            if bound and any(share in name for share in _SHARES):
                far, allowed = abs(ours - logged), min(bound, of_shares)
            yield far > allowed, far, allowed, self.step, f"{name} in {log}"

    def _compare_checkpoint(self) -> Iterator[Difference]:
        """Compares all variables with the checkpoint's, then goes on from it."""
        ours, averages, skipped = self._values(), self._averages, self._skipped
        share, had_averages = 1 - self._share, self._has_averages
        self._restore(self.step)
        theirs = self._values()
        allowed = dict.fromkeys(ours, self.bound) | {"counters": 0.0}
        if self.bound:
            # An average moves by the weights of these steps alone.
            allowed["averages"] = max(self.bound * share, _BOUNDS["float64"])
            of_state = min(_OF_STATE, 100 * self.bound)
            allowed |= {"statistics": of_state, "optimizer": of_state}
        for group, bound in allowed.items():
            far = max(map(relative_difference, ours[group], theirs[group]), default=0.0)
            yield far > bound, far, bound, self.step, f"{group} of the checkpoint"
        facts = {**averages, "skipped_steps": skipped}
        manifest = {**self._averages, "skipped_steps": self._skipped}
        if had_averages and self._has_averages:
            yield from self._differences(facts, manifest, self.bound, "the manifest")

    def find(self, first: int, last: int) -> tuple[int, float, float]:
        """Finds the step in which loss or gradient norm rises most, in one pass.

        A rise is relative to the highest of the three steps before. The first step that
        is not finite rises most. Returns step, cross entropy and gradient norm.
        """
        found: list[tuple[float, float]] = []
        rises: dict[int, float] = {}  # NaN if a step before was not finite either.
        for batches in self.steps(max(self.origin + 1, first - 3), last):
            metrics = self.advance(batches)
            entropy, norm = metrics["cross_entropy"], metrics["gradient_norm"]
            found.append((_number(entropy), _number(norm)))
            if self.step >= first:
                both = zip(found[-1], *(found[-4:-1] or found), strict=True)
                rises[self.step] = max(now / max(1e-30, *old) for now, *old in both)
        step = max(rises, key=rises.__getitem__)
        return step, *found[step - self.step - 1]

    def images(self, batches: Sequence[Batch]) -> list[tuple]:
        """Computes each image of the next step, given its `batches`, as a batch alone.

        Returns (gradient norm, cross entropy, name, PNG before distortion) for each.
        """
        training, found, chosen = self.training, [], self.next_pictures()
        images, labels = (tf.concat(parts, 0) for parts in zip(*batches, strict=True))
        for at, picture in enumerate(training.images[chosen]):
            one = images[at : at + 1], labels[at : at + 1]
            (result,) = training.towers.results([one], training.towers.devices[:1])
            norm = _number(float(tf.linalg.global_norm(widened(result.gradients))))
            loss = float(result.metrics["cross_entropy"])
            png = tf.io.encode_png(picture).numpy()
            found.append((norm, loss, self.names[chosen[at]], png))
        return found

    def next_pictures(self) -> np.ndarray:
        """Returns the indices of the next step's pictures, int64 [global batch]."""
        config, count = self.training.config, len(self.training.images)
        size = config.global_batch_size
        positions = self._batch * size + tf.range(size, dtype=tf.int64)
        return shuffled_indices(positions, count, config.run.seed).numpy()

    @property
    def _batch(self) -> int:
        """The number of the next input batch; rollbacks have left out earlier ones."""
        saved = [at for at in self.saved if at > self.step] or self.saved[-1:]
        manifests = [self.manifests.get(at, {}) for at in saved[:1]]
        return self.step + sum(one.get("left_out", 0) for one in manifests)

    def _compare_scores(self) -> Iterator[Difference]:
        """Compares the scores that the run shows of this step, and its temperatures."""
        try:
            yield from self._differences_of_scores()
        except UsageError as error:
            yield True, 2.0, 0.0, self.step, f"scores that are impossible: {error}"

    def _differences_of_scores(self) -> Iterator[Difference]:
        state, towers = self._state, self.training.towers
        bound = ROUNDING[self._precision]
        if are_replayed := self.step not in (0, *self.saved):  # Of the weights.
            bound = max(bound, self.bound)
        for split, lines in self.scored.items():
            for line in [line for line in lines if line["step"] == self.step]:
                count, log = line["num_examples"], scores.log_of(split)
                scored = self._scored_set(split, count)
                found = scored.score(state.averages, towers.devices[0]).scalars
                # By rounding: two images, or ten times what was measured in 16 bits.
                most = bound if are_replayed else max(0.02, 2 / count)
                yield from self._differences(found, line, bound, log, most)
                right = line[PRECISION] * count
                if (far := abs(right - round(right)) / count) > 1e-3 / count:
                    yield True, far, 0.0, self.step, f"whole images in {log}"
        folder = checkpoints.folder(self._directory, self.step)
        weights = [variable.value for variable in state.model.trainable_variables]
        of_files = dict(zip(temperature.FILES, (state.averages, weights), strict=True))
        for name in [name for name in of_files if (folder / name).exists()]:
            scored, bound = self._scored_set("val", None), temperature.ROUNDING
            outcomes = scored.score(of_files[name], towers.devices[0]).outcomes
            fitted = temperature.fit(outcomes.logits, outcomes.labels)
            far = relative_difference(fitted, temperature.read(folder / name))
            yield far > bound, far, bound, self.step, name

    def _restore(self, step: int, *, anew: bool = False) -> None:
        """Restores a step's checkpoint; with `anew` or without one, initial values."""
        manifest: Mapping[str, Any] = {checkpoints.AVERAGES: {}}
        if step in self.saved and not anew:
            found = checkpoints.verify(self._directory, step)
            checkpoints.restore(found, self._state.trackables())
            manifest = found.manifest
        else:
            for variable, value in self._initial:
                variable.assign(value)
        self._state.halted.assign(False)
        self.step, self._share = step, 1.0
        # An earlier version wrote none.
        self._has_averages = checkpoints.AVERAGES in manifest
        self._averages = {**manifest.get(checkpoints.AVERAGES, {})}
        self._skipped = manifest.get("skipped_steps", 0)

    def _values(self) -> dict[str, list[np.ndarray]]:
        """Returns what is compared, by group: each variable, or vectors of several."""
        state, found = self._state, collections.defaultdict[str, list[np.ndarray]](list)
        for group, variables in {
            "weights": state.model.trainable_variables,
            "averages": state.averages,
            "statistics": state.model.non_trainable_variables,
            "optimizer": state.optimizer.variables,
            "counters": [state.global_step],
        }.items():
            for value in map(np.asarray, variables):
                found["counters" if value.dtype.kind in "iub" else group].append(value)
        if not self.bound:
            return found
        # Rounding leaves little of a variable close to 0, and of slots only the size.
        for group in found.keys() - {"counters"}:
            found[group] = [np.concatenate([*map(np.ravel, found[group])])]
        found["optimizer"] = [np.asarray(np.linalg.norm(found["optimizer"]))]
        return found


def _settings(
    recorded: run_config.RecordedRun, towers: int | None, data_dir: str | None
) -> dict[str, Any]:
    """Returns the settings that replay a run, on its number of towers by default."""
    config, run = recorded.config, str(recorded.directory)
    values = run_config.config_to_resume(run, {"model": config.network.model})
    towers = towers or max(1, config.machine.towers)
    # The run's batches, if possible: batch norm and dropout depend on them.
    batches = max(1, config.machine.towers * config.batch.accumulate // towers)
    if (size := recorded.values["global_batch_size"]) % (towers * batches):
        why = f"the run's {size} images a step do not divide among these towers"
        raise UsageError(f"--num_gpus {towers}: {why}. Give another number.")
    values |= {"data_dir": data_dir or config.dataset.data_dir, "accumulate": batches}
    return values | {"num_gpus": towers, "split_gpu": 1, "variable_update": "towers"}


def _number(value: Any) -> float:
    return value if is_a(value, float) and abs(value) < _FAR else np.inf


def _machine(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what two runs must share to be the same bit for bit."""
    given = settings["versions"]  # Other versions round differently.
    versions = given if isinstance(given, dict) else {}  # A stranger's link.
    names = "tensorflow", "keras", "numpy", *run_config.HARDWARE
    found = {name: versions.get(name) for name in names}
    others = "workers", "devices", "accumulate"
    return found | {name: settings.get(name) for name in others}
