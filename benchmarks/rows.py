"""The rows of the comparison: who trains on what, in how many pieces."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.parity import Agreement

# Images per step, shared by all towers, as in the tutorial.
BATCH_SIZE = 128

OURS, TUTORIAL, KERAS, PYTORCH, INPUT = "ours", "tutorial", "keras", "pytorch", "input"

# Each names a data set, by the name that `cifar10.input.datasets.find` knows.
REAL, SYNTHETIC, CONSTANT = "real", "synthetic", "constant"
DATASETS = {REAL: "cifar10", SYNTHETIC: "synthetic", CONSTANT: None}

# The input is so much faster that its windows would be over at once.
_INPUT_FACTOR = 40
# Of the steps before a window, so many at least.
_FEWEST_STEPS = 2


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to train, or the input alone.

    Attributes:
        family: One of the five constants above.
        name: For people; with input and precision it is unique.
        input: Where the images come from.
        precision: The one asked for.
        module: Under `benchmarks.rivals`.
        options: For the module's `start`; the data set comes on top.
        images_per_step: Of all towers, replicas or processes together.
    """

    family: str
    name: str
    input: str
    precision: str
    module: str
    options: dict[str, Any]
    images_per_step: int = BATCH_SIZE

    @property
    def title(self) -> str:
        """What `--only` searches."""
        return f"{self.name}, {self.input} input, {self.precision}"

    @property
    def is_training(self) -> bool:
        """Whether there are a loss and gradients to agree on."""
        return self.family != INPUT

    def steps(self, steps: int) -> int:
        """Returns how many steps stand for so many of `BATCH_SIZE` images."""
        factor = _INPUT_FACTOR if self.family == INPUT else 1
        return max(_FEWEST_STEPS, steps * factor * BATCH_SIZE // self.images_per_step)


@dataclasses.dataclass
class Result:
    """What became of a row.

    Attributes:
        row: The row.
        precision: The type it computed in.
        problem: Why it was not measured, in one line; empty if it was.
        agreement: How far its loss and gradients are from ours.
        rates: Images a second in each timed window.
    """

    row: Row
    precision: str = ""
    problem: str = ""
    agreement: Agreement | None = None
    rates: list[float] = dataclasses.field(default_factory=list)

    @property
    def is_measured(self) -> bool:
        """Whether there are figures to show."""
        return bool(self.rates) and not self.problem


def all_rows() -> list[Row]:
    """Returns every row, in the table's order."""
    peers = [
        Row(
            TUTORIAL,
            "the tutorial's graph",
            REAL,
            "float32",
            "tutorial",
            {"batch_size": BATCH_SIZE},
        ),
        _keras("Keras fit", 1),
        _keras("Keras fit + MirroredStrategy, 2 x 64", 2),
        _pytorch("PyTorch", "float32", compiled=False),
        _pytorch("PyTorch, autocast", "bfloat16", compiled=False),
        _pytorch("PyTorch, autocast, compiled", "bfloat16", compiled=True),
        Row(
            PYTORCH,
            "PyTorch DistributedDataParallel, 2 x 64",
            CONSTANT,
            "float32",
            "pytorch_parallel",
            {"precision": "float32", "batch_size": BATCH_SIZE},
        ),
    ]
    alone = Row(
        INPUT,
        "the input alone",
        REAL,
        "float32",
        "input_alone",
        {"batch_size": BATCH_SIZE},
    )
    return [*peers, *_ours("float32"), *_ours("auto"), alone]


def _ours(precision: str) -> list[Row]:
    return [
        _towers(1, 128, REAL, precision),
        _towers(2, 64, REAL, precision),
        _towers(4, 32, REAL, precision),
        _towers(2, 128, REAL, precision),
        _towers(4, 128, REAL, precision),
        _towers(1, 128, SYNTHETIC, precision),
        _towers(1, 128, CONSTANT, precision),
    ]


def _towers(towers: int, batch_size: int, images: str, precision: str) -> Row:
    return Row(
        OURS,
        f"ours, {towers} x {batch_size}",
        images,
        precision,
        "towers",
        {"towers": towers, "batch_size": batch_size, "precision": precision},
        towers * batch_size,
    )


def _keras(name: str, replicas: int) -> Row:
    options = {"replicas": replicas, "batch_size": BATCH_SIZE}
    return Row(KERAS, name, CONSTANT, "float32", "keras_fit", options)


def _pytorch(name: str, precision: str, *, compiled: bool) -> Row:
    options = {
        "precision": precision,
        "compiled": compiled,
        "batch_size": BATCH_SIZE,
    }
    return Row(PYTORCH, name, CONSTANT, precision, "pytorch", options)
