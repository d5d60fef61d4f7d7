"""Measures what sections save and cost: PartialFlow's comparison, as a command.

    python -m benchmarks.sections --data_dir DIR

Trains the same residual network on the same real images whole, in sections, and with
TensorFlow's own tf.recompute_grad, one step of each in turn, each in a process of its
own. Prints memory above that after a step of a few images, step time and the largest
difference of losses. Ratios are medians over the rounds: trust those, not absolute
figures. With --plans it compares what `python -m cifar10 plan` says with the memory
above that before the first step.

The default takes 6 minutes and 6 GB on two cores.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import machine, report
from benchmarks.runner import Child, Result, Row, measure_in_turn, ratio, select_rows
from cifar10.errors import UsageError
from cifar10.input import datasets, records
from cifar10.process import entry_point

# As in PartialFlow's comparison.
_SIDE = 28
_UNTIMED_STEPS = 2


def make_rows(
    model: str, batch_size: int, counts: Sequence[int], **options: Any
) -> list[Row]:
    """Returns the rows of a model: whole, then in sections and recomputed."""

    def row(name: str, sections: int, *, recomputed: bool = False) -> Row:
        own = {"model": model, "batch_size": batch_size, "sections": sections}
        arguments = {**options, **own, "recomputed": recomputed}
        return Row(name, "benchmarks.rivals.sectioned", arguments, own)

    rows = [row("whole", 1)]
    for count in counts:
        if count > 1:
            rows.append(row(f"{count} sections", count))
            rows.append(row(f"{count} x tf.recompute_grad", count, recomputed=True))
    return rows


def compare(rows: Sequence[Row], rounds: int) -> list[Result]:
    """Lets all rows take turns, step by step, and notes time, memory and loss."""

    def prepare(result: Result, child: Child) -> None:
        for _ in range(_UNTIMED_STEPS):
            child.ask("step")
        result.facts["planned"] = child.ask("plan")

    def measure(result: Result, child: Child, number: int) -> dict[str, Any]:
        del number
        figures = child.ask("step")
        result.facts["measured"] = figures.pop("peak")
        return figures

    return measure_in_turn(rows, rounds, prepare=prepare, measure=measure)


def markdown(results: Sequence[Result], about: dict[str, Any]) -> str:
    """Returns the comparison of the rows with the whole model before them."""
    lines = []
    for one in results:
        if one.row.options["sections"] == 1 or not lines:
            whole = one
        names = [one.row.name, one.row.options["model"]]
        names.append(f"{one.row.options['batch_size']:,}")
        if not (one.is_measured and whole.is_measured):
            said = one.problem or "not measured"
            lines.append([*names, said, *[report.NO_FIGURE] * 5])
            continue
        losses = zip(one.figures("loss"), whole.figures("loss"), strict=True)
        peak, planned = (one.facts[name] for name in ("measured", "planned"))
        lines.append(
            [
                *names,
                report.median_and_range(
                    [1e3 * each for each in one.figures("seconds")]
                ),
                report.optional(ratio("seconds", one, whole), ".3f"),
                f"{peak / 1e6:,.0f}",
                f"{peak / whole.facts['measured']:.3f}",
                f"{planned / peak:.2f}" if about["plans"] else report.NO_FIGURE,
                f"{max(abs(loss / other - 1) for loss, other in losses):.0e}",
            ]
        )
    header = ["", "model", "images", "step, ms: median (least to most)"]
    header += ["time, to whole", "memory, MB", "memory, to whole", "plan, to memory"]
    header.append("largest difference of losses")
    return "\n\n".join([report.describe_conditions(about), report.table(header, lines)])


def real_images(data_dir: str | None, count: int) -> dict[str, np.ndarray]:
    """Returns real images, standardized, cut to 28 x 28, and their labels."""
    dataset = datasets.find("cifar10", data_dir)
    images, labels = dataset.read("train")
    if count > len(images):
        raise UsageError(f"There are {len(images):,} images, and {count:,} are needed.")
    edge = (records.HEIGHT - _SIDE) // 2
    cut = images[:count, edge : edge + _SIDE, edge : edge + _SIDE].astype(np.float32)
    mean = cut.mean(axis=(1, 2, 3), keepdims=True)
    deviation = cut.std(axis=(1, 2, 3), keepdims=True)
    return {"images": (cut - mean) / deviation, "labels": labels[:count]}


def _parse_flags() -> argparse.Namespace:
    parser = report.build_parser("sections", __doc__)
    add = parser.add_argument
    add("--models", nargs="+", default=["resnet"], help="as --model of train.py")
    add("--precision", default="float32", help="as --precision of train.py")
    add("--batch_sizes", type=int, nargs="+", default=[1000], help="images of a step")
    add("--sections", type=int, nargs="+", default=[2, 4], help="how many")
    add("--rounds", type=int, default=20, help="timed steps of each")
    add("--plans", action="store_true", help="compare plans with memory")
    flags = parser.parse_args()
    report.check_at_least(1, flags, "batch_sizes", "rounds", "sections")
    return flags


def main() -> None:
    """Runs the comparison and prints its table."""
    flags = _parse_flags()
    options: dict[str, Any] = {"precision": flags.precision, "warm": not flags.plans}
    steps = _UNTIMED_STEPS + flags.rounds
    options |= real_images(flags.data_dir, steps * max(flags.batch_sizes))
    results: list[Result] = []
    for model, size in itertools.product(flags.models, flags.batch_sizes):
        rows = make_rows(model, size, flags.sections, **options)
        if flags.plans:
            rows = [row for row in rows if not row.options["recomputed"]]
        results += compare(select_rows(rows, flags.only), flags.rounds)
    about = {**machine.describe(), **vars(flags)}
    print(markdown(results, about))


if __name__ == "__main__":
    entry_point.run_program(main)
