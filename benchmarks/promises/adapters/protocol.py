"""What an adapter is asked and answers; it needs Python and NumPy alone.

The contract starts `COMMAND JOB.json`. The JSON has the fields of `Job`. Training, the
adapter calls `reached` after each update; at the end it writes `answer`. An adapter in
another language does the same: it touches the file `gate` after update `wait_at`, waits
until that file is gone, and writes a NumPy archive.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Job:
    """One thing that a trainer has to do.

    Attributes:
        task: "describe" for what the trainer is, "train", or "evaluate" for a score of
            the newest weights in `folder`.
        folder: The trainer's own, empty in a new run.
        data: Archive of x, y (trained on) and x_test, y_test (scored): uint8 [count,
            height, width, 3] and int64 [count].
        answer: The archive to write.
        gate: The file that says that the trainer waits.
        resume: Whether to continue the run in `folder`.
        workers: Processes, replicas or towers.
        batch_size: Images of one update, of all workers and accumulated batches.
        accumulate: Batches of each worker in an update.
        steps: Updates in the whole run.
        save_steps: Updates between two checkpoints and between two scores, for trainers
            that do not recommend to save at ends of epochs.
        wait_at: The update after which to wait; 0 for none.
        learning_rate: At the first update; a cosine lowers it to zero at `steps`.
        momentum: Of SGD.
        constant: Whether the learning rate stays.
        seed: For the initial values and the order of the images.
    """

    task: str
    folder: str
    data: str
    answer: str
    gate: str
    resume: bool = False
    workers: int = 1
    batch_size: int = 8
    accumulate: int = 1
    steps: int = 48
    save_steps: int = 5
    wait_at: int = 0
    learning_rate: float = 0.01
    momentum: float = 0.9
    constant: bool = False
    seed: int = 1

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Returns x, y, x_test, y_test."""
        with np.load(self.data) as file:
            return tuple(file[name] for name in ("x", "y", "x_test", "y_test"))

    @property
    def epoch_steps(self) -> int:
        """The updates of an epoch."""
        return len(self.arrays()[1]) // self.batch_size


def read_job() -> Job:
    """Returns the job that the command line names."""
    return Job(**json.loads(Path(sys.argv[-1]).read_text()))


_rates: dict[int, float] = {}


def reached(job: Job, step: int, rate: float) -> None:
    """Notes an update and its learning rate, and waits if the job says so."""
    _rates[step] = float(rate)
    gate = Path(job.gate)
    if step == job.wait_at and not gate.exists():
        gate.touch()
        while gate.exists():
            time.sleep(0.01)


def answer(job: Job, weights: Iterable[Any] = (), **facts: Any) -> None:
    """Writes the answer.

    Args:
        job: The job.
        weights: All weights, in a fixed order.
        **facts: `step` (the last update) and `best` (the best score, for a training
            that offers one); `loss` and `accuracy` of an evaluation.
    """
    facts["rates"] = {str(step): rate for step, rate in _rates.items()}
    arrays = {f"w{number}": np.asarray(one) for number, one in enumerate(weights)}
    np.savez(job.answer, facts=json.dumps(facts), **arrays)


def describe(
    job: Job,
    name: str,
    version: str,
    checkpoint: str,
    documents: str,
    *,
    workers: int = 2,
    lacks: Mapping[str, str] | None = None,
) -> None:
    """Answers "describe".

    Args:
        job: The job.
        name: For people.
        version: Of the installed package.
        checkpoint: A pattern of the files of weights in a run's folder.
        documents: The address of what the trainer itself promises.
        workers: How many it trains with.
        lacks: By promise, why it is not offered.
    """
    facts = {"name": name, "version": version, "checkpoint": checkpoint}
    answer(job, **facts, documents=documents, workers=workers, lacks=dict(lacks or {}))
