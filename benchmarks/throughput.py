"""Times training steps side by side with the peers', in one run.

    python -m benchmarks.throughput --data_dir ~/.cache/cifar10

Every rival is a process of its own and they take turns, window by window, so that a
machine whose speed drifts treats them alike; before each timed window come steps that
are not timed. Before anything is timed, everyone computes the loss and the gradients of
one batch from the same initial values, and who does not agree is not timed. Quote the
ratios, not the absolute figures.

All rows take about 20 minutes on two cores and some 15 GB of memory. For a quick look:
--only tutorial "1 x 128, real" --repeats 3
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any

from benchmarks import machine, parity, report
from benchmarks.rivals import common
from benchmarks.runner import Child, Result, Row, measure_in_turn, ratio, select_rows
from cifar10.input import datasets
from cifar10.process import entry_point

# Images per step, shared by all towers, as in the tutorial.
BATCH_SIZE = 128
REAL, CONSTANT = "real", "constant"

_RIVALS = "benchmarks.rivals"
_UNTIMED_STEPS = 10
# The fewest steps before and in a timed window.
_FEWEST_STEPS = 2
# The input is so much faster that its windows would be over at once.
_INPUT_FACTOR = 40

# Bounds on the relative difference of the loss and, in norm, of each gradient.
# In float32 all rivals are within 3e-6 of each other.
_FLOAT32_BOUNDS = (1e-4, 1e-4)
# With the 8 bits of bfloat16 neighbours often tie for the largest in a pool, and the
# gradient goes to another of them: ours and PyTorch's both differ by 0.16 in the first
# filters and by less everywhere else, while the loss differs by 1e-5.
_HALF_BOUNDS = (1e-3, 0.3)

_CONDITIONS = (
    "Constant input is one batch in memory, which reads and distorts nothing. Keras "
    "(jit_compile=False on CPUs) and PyTorch (channels last) keep no moving averages, "
    "the others do. Everyone may use all cores; the two processes of "
    "DistributedDataParallel share them."
)

# Initial values, images and labels, and what our float32 tower makes of them.
Reference = tuple[tuple, parity.Step]


def all_rows() -> list[Row]:
    """Returns every row, in the table's order."""

    def row(name: str, images: str, asked: str, module: str, **options: Any) -> Row:
        options = {"batch_size": BATCH_SIZE, **options}
        details = {"input": images, "asked": asked}
        return Row(name, f"{_RIVALS}.{module}", options, details)

    def keras(name: str, replicas: int) -> Row:
        return row(name, CONSTANT, "float32", "keras_fit", replicas=replicas)

    def pytorch(name: str, precision: str = "float32", **options: Any) -> Row:
        options = {"precision": precision, **options}
        return row(name, CONSTANT, precision, "pytorch", **options)

    def towers(count: int, batch_size: int, images: str, precision: str) -> Row:
        options = {"towers": count, "batch_size": batch_size, "precision": precision}
        name = f"ours, {count} x {batch_size}"
        return row(name, images, precision, "towers", **options)

    return [
        row("the tutorial's graph", REAL, "float32", "tutorial"),
        keras("Keras fit", 1),
        keras("Keras fit + MirroredStrategy, 2 x 64", 2),
        pytorch("PyTorch"),
        pytorch("PyTorch, autocast", "bfloat16"),
        pytorch("PyTorch, autocast, compiled", "bfloat16", compiled=True),
        pytorch("PyTorch DistributedDataParallel, 2 x 64", processes=2),
        *(
            towers(*shape, images, precision)
            for precision in ("float32", "auto")
            for shape, images in (
                *((shape, REAL) for shape in ((1, 128), (2, 64), (4, 32))),
                *((shape, REAL) for shape in ((2, 128), (4, 128))),
                ((1, 128), CONSTANT),
            )
        ),
        row("the input alone", REAL, "float32", "towers", trains=False),
    ]


def is_training(row: Row) -> bool:
    """Tells whether a row trains, and is not the input alone."""
    return row.options.get("trains", True)


def images_per_step(row: Row) -> int:
    """Returns the images of all towers, replicas or processes of a row together."""
    return row.options.get("batch_size", BATCH_SIZE) * row.options.get("towers", 1)


def make_reference(module: str = f"{_RIVALS}.towers") -> Reference:
    """Has one of our towers compute a step in float32, which all are compared with."""
    options = {"towers": 1, "batch_size": BATCH_SIZE, "precision": "float32"}
    with contextlib.closing(Child(module, options)) as child:
        batch = common.constant_batch(BATCH_SIZE, seed=1)
        given = child.ask("initial_values"), *batch
        return given, child.ask("check", *given)


def check(found: parity.Step, expected: parity.Step, precision: str) -> list:
    """Returns the checks of a rival that computes in a precision."""
    bounds = _FLOAT32_BOUNDS if precision == "float32" else _HALF_BOUNDS
    return parity.compare_steps(found, expected, *bounds)


def compare(
    rows: Sequence[Row], reference: Reference | None, *, repeats: int, steps: int
) -> list[Result]:
    """Starts the rivals, checks that they agree and lets them take turns.

    Args:
        rows: The rivals.
        reference: What all that train are compared with.
        repeats: Timed windows of each row.
        steps: Steps of `BATCH_SIZE` images in a window.
    """

    def prepare(result: Result, child: Child) -> None:
        if reference and is_training(result.row):
            given, expected = reference
            found = child.ask("check", *given)
            result.checks = check(found, expected, child.precision)

    def measure(result: Result, child: Child, number: int) -> dict[str, Any]:
        del number
        factor = 1 if is_training(result.row) else _INPUT_FACTOR
        images = images_per_step(result.row)
        # As many images, whatever the batch.
        untimed, timed = (
            max(_FEWEST_STEPS, count * factor * BATCH_SIZE // images)
            for count in (_UNTIMED_STEPS, steps)
        )
        seconds = child.ask("run", untimed, timed)
        return {"images_per_second": timed * images / seconds}

    return measure_in_turn(rows, repeats, prepare=prepare, measure=measure)


def markdown(results: Sequence[Result], about: dict[str, Any]) -> str:
    """Returns the report: a table with the ratios to the peers."""
    rate = "images_per_second"
    by_module: dict[str, list[Result]] = {}
    for one in results:
        if one.is_measured and is_training(one.row):
            by_module.setdefault(one.row.module.split(".")[-1], []).append(one)
    [tutorial], [keras] = (
        by_module.get(name, [None])[:1] for name in ("tutorial", "keras_fit")
    )
    best = max(
        by_module.get("pytorch", []), key=lambda one: one.median(rate), default=None
    )
    lines = []
    for one in results:
        asked = one.row.details["asked"]
        used = asked if one.precision in ("", asked) else f"{asked}: {one.precision}"
        figures = one.problem or "not measured"
        if one.is_measured:
            figures = report.median_and_range(one.figures(rate))
        peers = (tutorial, keras, best) if is_training(one.row) else (None,) * 3
        ratios = [report.optional(ratio(rate, one, peer)) for peer in peers]
        lines.append([one.row.name, one.row.details["input"], used, figures, *ratios])
    windows = (
        f"Windows: {about['repeats']} of each rival, in turn, of as many images as "
        f"{about['steps']} steps of {BATCH_SIZE}."
    )
    header = ["model and towers", "input", "precision"]
    header += ["images/s: median (least to most)", "times the tutorial's graph"]
    header += ["times Keras fit", "times PyTorch's best"]
    parts = [
        report.describe_conditions(about, f"Real input: {about['data']}.", windows),
        report.table(header, lines),
        _CONDITIONS,
        report.describe_agreement(results),
    ]
    return "\n\n".join(part for part in parts if part)


def _parse_flags() -> argparse.Namespace:
    parser = report.build_parser("throughput", __doc__)
    parser.add_argument("--repeats", type=int, default=9, help="timed windows of each")
    parser.add_argument(
        "--steps", type=int, default=30, help="steps of 128 images in a window"
    )
    flags = parser.parse_args()
    report.check_at_least(1, flags, "repeats", "steps")
    return flags


def main() -> None:
    """Runs the comparison and prints its table."""
    flags = _parse_flags()
    rows = select_rows(all_rows(), flags.only)
    real = [row for row in rows if row.details["input"] == REAL]
    dataset = datasets.find("cifar10", flags.data_dir) if real else None
    for row in real:
        row.options["dataset"] = dataset
    about = {
        **machine.describe(),
        "repeats": flags.repeats,
        "steps": flags.steps,
        "data": dataset.description if dataset else "none",
    }
    reference = make_reference() if any(map(is_training, rows)) else None
    results = compare(rows, reference, repeats=flags.repeats, steps=flags.steps)
    print(markdown(results, about))


if __name__ == "__main__":
    entry_point.run_program(main)
