"""Trains from a Python program in the same way as from the command line."""

import contextlib
import dataclasses
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar10 import hardware
from cifar10.config import fields, layout
from cifar10.config.config import Config
from cifar10.config.run_config import RecordedRun
from cifar10.distributed import cluster
from cifar10.errors import UsageError
from cifar10.models.architecture import Architecture
from cifar10.models.registry import ARCHITECTURES, PYTHON
from cifar10.process import entry_point
from cifar10.process.signals import StopSignals
from cifar10.run_directory import checkpoints, early_stopping, logs, scores


@dataclasses.dataclass(frozen=True)
class Record:
    """The result of a training run.

    Attributes:
        train_dir: The directory of the run.
        step: The last step.
        ended: Why training ended: `max_steps`, `max_epochs`, `max_hours` or `no_gain`.
        seconds: Wall time of this call of `train`, without earlier sessions.
        history: Metrics by step, every `log_frequency` steps, from all sessions.
        scores: Maps steps to the recorded score that `best_by` names, on the val split
            if there is one, else on the test split.
        config: The configuration of the run.

    Example:
        >>> x, y = np.zeros([64, 32, 32, 3], np.uint8), np.arange(64) % 2
        >>> config = Config(data=(x, y), max_steps=4, batch_size=8, log_frequency=2)
        >>> record = train(config)
        Towers: ...
        >>> record.step, record.ended, sorted(record.history)
        (4, 'max_steps', [2, 4])
        >>> record.metrics["cross_entropy"] > 0
        True
    """

    train_dir: Path
    step: int
    ended: str
    seconds: float
    history: Mapping[int, Mapping[str, float]] = dataclasses.field(repr=False)
    scores: Mapping[int, float] = dataclasses.field(repr=False)
    config: Config = dataclasses.field(repr=False)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the last logged step."""
        return self.history[max(self.history)] if self.history else {}

    @property
    def best(self) -> tuple[int, float] | None:
        """The step with the best score, and that score; None if there is no score."""
        steps = scores.ranked(self.scores, self.config.checkpoints.best_by)
        return (steps[0], self.scores[steps[0]]) if steps else None


def train(config: Config, hooks: Sequence[object] = ()) -> Record:
    """Trains a model as `config` says, resuming from the newest checkpoint.

    Like the command `train`, uses several towers and machines (`TF_CONFIG`), resumes
    exactly and writes files to `train_dir`. It seeds the random generators of Python,
    NumPy and TensorFlow. In the main thread, Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP save a
    checkpoint after the current step and end training.

    Args:
        config: The configuration.
        hooks: Objects with some of the methods of `cifar10.training.hooks.Hook`, called
            only on the first of several machines.

    Returns:
        The record of the run.

    Raises:
        StoppedError: A signal has ended the training.
        UsageError: A setting, file or machine prevents it; the message has the fix.

    Example:
        >>> x, y = np.zeros([64, 32, 32, 3], np.uint8), np.arange(64) % 2
        >>> record = train(Config(data=(x, y), max_steps=4, batch_size=8))
        Towers: ...
        >>> record.step
        4
    """
    if not isinstance(config, Config):
        raise UsageError(f"train: {type(config).__name__} is not a cifar10.Config.")
    if not isinstance(hooks, Sequence):
        raise UsageError(f"hooks: {type(hooks).__name__} is not a list of hooks.")
    processes = config.processes
    if processes.local_workers or processes.max_restarts or processes.seeds:
        names = "local_workers, max_restarts and seeds"
        raise UsageError(f"Config: give {names} to `cifar10 train`.")
    began, deterministic = time.perf_counter(), config.speed.deterministic
    uses_onednn = hardware.uses_onednn(by_default=True)
    if deterministic and "tensorflow" in sys.modules and uses_onednn:
        why = "deterministic=True: TensorFlow is already imported, with oneDNN"
        fix = "Set TF_ENABLE_ONEDNN_OPTS=0, or import it only where the model is built"
        raise UsageError(f"{why}. {fix}.")
    entry_point.import_tensorflow(deterministic=deterministic, stop=StopSignals())
    # These modules import TensorFlow, whose environment is set above.
    from cifar10.interface.data import as_dataset
    from cifar10.training import train as training

    register_model(config)
    is_main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as stack:
        stop = StopSignals()
        if is_main and cluster.is_requested():  # All machines stop after the same step.
            stack.enter_context(stop)
        elif is_main:
            stop = _SignalsOfSteps(stack)
        workers = cluster.from_environment()
        dataset = as_dataset(config.data_objects)
        step = training.train(config, stop, workers, hooks=hooks, dataset=dataset)
    train_dir = layout.absolute_path(config.run.train_dir)
    return read_record(train_dir, step, time.perf_counter() - began, config)


def read_record(train_dir: Path, step: int, seconds: float, config: Config) -> Record:
    """Reads the record of a run from its directory."""
    history, others = {}, ("step", "time", "seconds")  # Entries that are no metrics.
    for line in logs.read_steps(train_dir / layout.METRICS):
        values = {k: math.nan if v is None else v for k, v in line.items()}
        history[line["step"]] = {k: values[k] for k in values if k not in others}
    ended, by = _why_ended(train_dir, step, config), config.checkpoints.best_by
    scored = scores.deciding(train_dir, by=by)
    return Record(train_dir, step, ended, seconds, history, scored.values, config)


def _why_ended(train_dir: Path, step: int, config: Config) -> str:
    trained: fields.BaseConfig = config
    manifest: Mapping[str, Any] = {"step": step}
    saved = train_dir / layout.CHECKPOINTS
    if step in checkpoints.steps(saved):  # Else another machine has the run.
        trained = RecordedRun.read(train_dir).config
        manifest = checkpoints.read_manifest(saved, step)
    limits = [name for name in reversed(fields.LENGTHS) if trained.values[name]]
    if trained.checkpoints.stop_after_no_gain:
        limits = ["no_gain"]  # Of a pruned run, the best checkpoint is left.
    return early_stopping.why_ended(trained, manifest) or limits[0]


def register_model(config: Config) -> None:
    """Registers `config.model_function` under the name `config.network.model`."""
    if config.model_function and config.network.model.startswith(PYTHON):
        ARCHITECTURES[config.network.model] = Architecture(config.model_function)


class _SignalsOfSteps(StopSignals):
    """Handles signals from the first step on, until `held` is closed."""

    def __init__(self, held: contextlib.ExitStack) -> None:
        super().__init__()
        self._held = held

    def defer(self) -> None:
        """Installs the signal handlers, which only record signals."""
        super().defer()
        self._held.enter_context(self)
