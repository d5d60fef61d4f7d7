"""One row in a process of its own: checked, warmed up, then asked for its epochs."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rivals.common import insist_on_finite
from benchmarks.rosetta import parity
from benchmarks.rosetta.task import Task, batches, initial_values, untied_batches

_WARM_UP_STEPS = 2
# All compute on the CPU: on a GPU PyTorch would need other code, JAX another package.
_DEVICE_VARIABLES = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
# What the frameworks read at their start, before any of their own settings.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",  # PyTorch, and oneDNN within it.
    "MKL_NUM_THREADS",
    "NPROC",  # XLA on a CPU.
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)


@dataclasses.dataclass(frozen=True)
class Data:
    """What is trained and tested on, as files that all processes share.

    Attributes:
        folder: Holds `inputs.npy`, `labels.npy`, `test_inputs.npy`, `test_labels.npy`.
        batch_size: Examples in a step, of all towers together.
        steps: Steps in an epoch at most; 0 for as many as there are batches.
        description: One line for people.
    """

    folder: Path
    batch_size: int
    steps: int
    description: str


def start(
    *,
    module: str,
    task: Task,
    data: Data,
    threads: int,
    options: dict[str, Any],
    environment: dict[str, str],
) -> Participant:
    """Imports a framework, with the threads that it may have, and reads the data.

    Args:
        module: One of those beside this one, such as `cnn_pytorch`, by its full name.
        task: What to train.
        data: On what.
        threads: How many, and on how many cores.
        options: Further arguments of its `Model`.
        environment: Variables that the framework reads when it is imported.
    """
    threads_of = dict.fromkeys(_THREAD_VARIABLES, str(threads))
    os.environ |= threads_of | _DEVICE_VARIABLES | environment
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    model = importlib.import_module(module).Model
    return Participant(functools.partial(model, **options), task, data)


class Participant:
    """A row's model with its data.

    Args:
        make: From a task to a model.
        task: What to train.
        data: On what.
    """

    precision = "float32"

    def __init__(self, make: Any, task: Task, data: Data) -> None:
        self._make = make
        self._task = task
        # The processes of all rows share the pages of the largest file.
        self._batches = functools.partial(
            batches,
            np.load(data.folder / "inputs.npy", mmap_mode="r"),
            np.load(data.folder / "labels.npy"),
            batch_size=data.batch_size,
            steps=data.steps,
        )
        self._test_inputs = np.load(data.folder / "test_inputs.npy")
        self._test_labels = np.load(data.folder / "test_labels.npy")

    def warm_up(self) -> float:
        """Builds the model that is timed; returns the seconds until two steps are done.

        That is the framework's own start and the compilation.
        """
        began = time.perf_counter()
        self._model = self._make(self._task)
        self._model.load(initial_values(self._task.network))
        self._model.train(itertools.islice(self._batches(epoch=0), _WARM_UP_STEPS))
        return time.perf_counter() - began

    def check(self) -> parity.Evidence:
        """Shows what other models of this row do, made like the one that is timed."""
        network = self._task.network
        pair = list(itertools.islice(self._batches(epoch=0), 2))
        untied = pair if network == "gru" else untied_batches()
        values = initial_values(network)
        return parity.collect(self._make, self._task, values, pair[0], untied)

    def train(self, epoch: int, run: int) -> tuple[float, float]:
        """Trains for an epoch, a run's first anew; returns seconds and mean loss."""
        if epoch == 0:
            self._model.load(initial_values(self._task.network, run))
        began = time.perf_counter()
        loss = self._model.train(self._batches(epoch=epoch, seed=run))
        seconds = time.perf_counter() - began
        insist_on_finite(loss)
        return seconds, float(loss)

    def accuracy(self) -> float:
        """Returns the part of the test set that is classified rightly."""
        logits = self._model.predict(self._test_inputs)
        return float(np.mean(logits.argmax(1) == self._test_labels))
