"""Trains on CIFAR-10 to the end of a recipe, in turn with airbench94 in PyTorch.

    python -m benchmarks.time_to_94 --data_dir ~/.cache/cifar10 --seeds 10

Before anything is timed, both compute loss, gradients and first update of the airbench
network from the same values and images in float32, and who does not agree is not timed.
Then they train in turn, seed by seed, so that a machine whose speed drifts treats them
alike. The clock is airbench94's: whitening, training and scoring the six views, without
tracing, compiling, saving, and the score without views. Quote the ratios, not the
absolute figures.

A run takes minutes on a CPU; --only chooses rows. For a quick look, whose
accuracy says nothing: --seeds 1 --steps 10 --images 200
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, parity, report
from benchmarks.runner import Child, Result, Row, measure_in_turn, ratio, select_rows
from cifar10.config.config import read_recipe
from cifar10.input import datasets
from cifar10.process import entry_point

PATIENCE_SECONDS = 2 * 3600.0  # Of a run on a CPU that others use too.
# Airbench's published rules as a recipe of ours, which shows that they are the same.
PUBLISHED = Path(__file__).with_name("airbench94.toml")
AIRBENCH, OURS = "benchmarks.rivals.airbench", "benchmarks.rivals.recipe"
_COMPARED_IMAGES = 200
# On relative differences: of the loss, and in norm of each gradient and of each
# variable's change in the first update. Those seen are below 1e-7 and 5e-5.
LOSS_BOUND, BOUND = 1e-5, 5e-4

_CLOCK = (
    "Seconds are of whitening, training and scoring six views of the test images; "
    "tracing, compiling, saving and the score without views are left out. A call that "
    "is also traced counts as long as the others. Operations are those of convolutions "
    "and matrix products in losses and gradients."
)

# The loss, the gradients and the updated values.
Updated = tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]


def all_rows(recipes: Sequence[str], **options: Any) -> list[Row]:
    """Returns a row for each recipe, and airbench's two; `options` are for all."""
    given = {name: value for name, value in options.items() if value}
    ours = [
        Row(f"ours, {recipe}", OURS, {"recipe": recipe, **given}) for recipe in recipes
    ]
    eager = Row("airbench, PyTorch, eager", AIRBENCH, given)
    compiled = Row("airbench, PyTorch, compiled", AIRBENCH, {**given, "compiled": True})
    return [*ours, eager, compiled]


def check(
    values: dict[str, np.ndarray], found: Updated, expected: Updated
) -> list[parity.Check]:
    """Returns the checks of a step that began with the same values as ours."""
    changes = [
        {name: value - values[name] for name, value in step[2].items()}
        for step in (found, expected)
    ]
    return [
        *parity.compare_steps(found[:2], expected[:2], LOSS_BOUND, BOUND),
        parity.compare_variables("difference of the first update", *changes, BOUND),
    ]


def compare(rows: Sequence[Row], dataset: datasets.Dataset, seeds: int) -> list[Result]:
    """Starts the rows, checks that airbench is ours, and lets all train in turn."""
    published = {"recipe": str(PUBLISHED), "dataset": dataset}
    with contextlib.closing(Child(OURS, published, PATIENCE_SECONDS)) as ours:
        batch = ours.ask("reference", _COMPARED_IMAGES)
        expected = ours.ask("check", *batch)
        facts = ours.ask("facts")

    def prepare(result: Result, child: Child) -> None:
        if result.row.module == AIRBENCH:
            # The same network, so the same operations.
            result.facts = facts
            result.checks = check(batch[0], child.ask("check", *batch), expected)
        else:
            result.facts = child.ask("facts")

    return measure_in_turn(
        rows,
        seeds,
        prepare=prepare,
        measure=lambda _, child, seed: child.ask("run", seed),
        patience=PATIENCE_SECONDS,
    )


def markdown(results: Sequence[Result], about: dict[str, Any]) -> str:
    """Returns the whole report.

    Args:
        results: The rows.
        about: What `machine.describe` returns, with `data`, `seeds`, `steps` and
            `images`.
    """
    length = f"Seeds 0 to {about['seeds'] - 1}, in turn."
    if about["steps"] or about["images"]:
        steps, images = about["steps"] or "all", about["images"] or "the usual"
        length += f" Cut short, {steps} steps of {images} images: no accuracy."
    header = ["what", "precision", "seconds: mean ± deviation", "times airbench's best"]
    header += ["six views", "one view", "MFLOP an image", "PFLOP of a whole one"]
    parts = [
        report.describe_conditions(about, f"Data: {about['data']}.", length),
        report.table(header, _lines(results)),
        _CLOCK,
        report.describe_agreement(results),
    ]
    return "\n\n".join(part for part in parts if part)


def _lines(results: Sequence[Result]) -> list[list[str]]:
    airbench = min(
        (one for one in results if one.row.module == AIRBENCH and one.is_measured),
        key=lambda one: one.median("seconds"),
        default=None,
    )
    lines = []
    for one in results:
        names = [one.row.name, one.precision or report.NO_FIGURE]
        if not one.is_measured:
            said = one.problem or "not measured"
            lines.append([*names, said, *[report.NO_FIGURE] * 5])
            continue
        operations = one.facts["operations"]
        accuracies = [
            report.mean_and_deviation(
                [100 * part for part in one.figures(name)], 2, " %"
            )
            for name in ("accuracy_with_views", "accuracy")
        ]
        lines.append(
            [
                *names,
                report.mean_and_deviation(one.figures("seconds"), 1),
                report.optional(ratio("seconds", one, airbench)),
                *accuracies,
                f"{operations / one.facts['images'] / 1e6:,.0f}",
                f"{operations / 1e15:.3g}",
            ]
        )
    return lines


def _parse_flags() -> argparse.Namespace:
    parser = report.build_parser("time_to_94", __doc__)
    add = parser.add_argument
    add("--seeds", type=int, default=3, help="trainings of each row")
    add("--recipe", nargs="+", default=["fast"], help="ours to train: names or files")
    add("--steps", type=int, help="for a look: updates until the rates are zero")
    add("--images", type=int, help="for a look: images in a step")
    flags = parser.parse_args()
    report.check_at_least(1, flags, "seeds", "images")
    report.check_at_least(2, flags, "steps")  # The first one is not timed.
    for recipe in flags.recipe:
        read_recipe(recipe)
    return flags


def main() -> None:
    """Runs the comparison and prints its table."""
    flags = _parse_flags()
    every = all_rows(flags.recipe, steps=flags.steps, batch_size=flags.images)
    rows = select_rows(every, flags.only)
    dataset = datasets.find("cifar10", flags.data_dir)
    for row in rows:
        row.options["dataset"] = dataset
    about = {
        **machine.describe(),
        "data": dataset.description,
        **{name: getattr(flags, name) for name in ("seeds", "steps", "images")},
    }
    results = compare(rows, dataset, flags.seeds)
    print(markdown(results, about))


if __name__ == "__main__":
    entry_point.run_program(main)
