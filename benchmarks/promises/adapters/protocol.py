"""What an adapter is asked and answers; it needs Python and NumPy alone.

The contract starts `COMMAND JOB.json`. The JSON has the fields of `Job`. An adapter in
Python calls `serve`. One in another language touches the file `gate` after update
`wait_at`, waits until that file is gone, and writes the NumPy archive of `_answer`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Learning rates by update.
_rates: dict[int, float] = {}


@dataclasses.dataclass(frozen=True)
class Trainer:
    """What an adapter says of its trainer.

    Attributes:
        name: For people.
        version: Of the installed package.
        checkpoint: A pattern of the files of weights in a run's folder.
        documents: The address of what the trainer itself promises.
        workers: How many it trains with.
        lacks: By promise, why it is not offered.
    """

    name: str
    version: str
    checkpoint: str
    documents: str
    workers: int = 2
    lacks: Mapping[str, str] = dataclasses.field(default_factory=dict)


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

    def arrays(self) -> tuple[tuple[np.ndarray, ...], ...]:
        """Returns the images to train on and those to score, each with labels."""
        with np.load(self.data) as file:
            return (file["x"], file["y"]), (file["x_test"], file["y_test"])

    @property
    def worker_batch_size(self) -> int:
        """The images of one batch of one worker."""
        return self.batch_size // self.workers // self.accumulate

    def reached(self, step: int, rate: float) -> None:
        """Notes an update and its learning rate, and waits if the job says so.

        A trainer may call this after each batch, with the updates done so far, and in
        each process: an update is noted once, by the first.
        """
        if not _is_first() or int(step) in {0, *_rates}:
            return
        _rates[int(step)] = float(rate)
        gate = Path(self.gate)
        if step == self.wait_at:
            gate.touch()
            while gate.exists():
                time.sleep(0.01)


def serve(
    train: Callable[[Job], tuple],
    evaluate: Callable[[Job], tuple],
    *,
    torchrun: bool = False,
    **about: Any,
) -> None:
    """Does the job that the command line names.

    Args:
        train: Trains or resumes, and calls `Job.reached`. Returns all weights in a
            fixed order, the last update, and the best score if the trainer knows one.
        evaluate: Returns the loss and the accuracy of the newest weights.
        torchrun: Whether torchrun starts the workers.
        **about: The fields of `Trainer`.
    """
    job = Job(**json.loads(Path(sys.argv[-1]).read_text()))
    if job.task == "describe":
        _answer(job, **dataclasses.asdict(Trainer(**about)))
    elif torchrun and "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(job.workers), *sys.argv]
        os.execv(sys.executable, command)  # noqa: S606
    elif job.task == "evaluate":
        loss, accuracy = map(float, evaluate(job))
        _answer(job, loss=loss, accuracy=accuracy)
    else:
        weights, step, best = train(job)
        best = None if best is None else float(best)
        _answer(job, weights, step=int(step), best=best)


def _is_first() -> bool:
    """Returns whether LOCAL_RANK, of torchrun and Lightning, is 0 or not set."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _answer(job: Job, weights: Iterable[Any] = (), **facts: Any) -> None:
    """Writes the weights as w0, w1, ... and, as a JSON, `facts` with `rates`."""
    if _is_first():
        facts["rates"] = {str(step): rate for step, rate in _rates.items()}
        arrays = {f"w{number}": np.asarray(one) for number, one in enumerate(weights)}
        np.savez(job.answer, facts=json.dumps(facts), **arrays)
