"""Enters a row into the board of records, docs/records.md, which has the rules.

    python -m benchmarks.record --recipe fast --seeds 10 --data_dir ~/.cache/cifar10

Trains a recipe on CIFAR-10 with the seeds 0, 1 and so on, by the clock of
`benchmarks.time_to_94`, and scores the test images after each run. The row is
printed, and entered if the mean is above the record's level.

Finished trainings are kept in build/record.jsonl, so that the same command on the same
commit, machine and versions continues with the next seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, report
from benchmarks.runner import Child, Result, Row, measure_in_turn, show_progress
from benchmarks.time_to_94 import OURS, PATIENCE_SECONDS
from cifar10.config.config import Config
from cifar10.errors import UsageError, reason
from cifar10.input import datasets
from cifar10.models.registry import is_code
from cifar10.process import entry_point
from cifar10.run_directory import logs

BOARD = machine.ROOT / "docs/records.md"
KEPT = machine.ROOT / "build/record.jsonl"
# As airbench does: a mean that rounds up to the level.
_BELOW_LEVEL = 0.05
SIGNIFICANCE = 0.05
# With these, scores of the test part decide what is trained or which weights are kept.
_LOOKING = ("eval_steps", "stop_after_no_gain", "keep_best")


def p_value(scores: Sequence[float], threshold: float) -> float:
    """Returns how likely such a mean or a higher one is if the true one is `threshold`.

    By Student's one-sided t-test. With t = sqrt(freedom) * tan(angle) the density of t
    is cos(angle) ** (freedom - 1), up to a factor, between two right angles.

    Raises:
        UsageError: The scores have no deviation.
    """
    freedom = len(scores) - 1
    deviation = statistics.stdev(scores) if freedom else 0.0
    if not deviation:
        said = ", ".join(f"{score:g}" for score in scores)
        raise UsageError(f"Scores {said}: no deviation, so no p. Train more --seeds.")
    t = (statistics.mean(scores) - threshold) / deviation * len(scores) ** 0.5

    def area_above(angle: float) -> float:
        angles = np.linspace(angle, math.pi / 2, 100_001)
        return float(np.trapezoid(np.cos(angles) ** (freedom - 1), angles))

    return area_above(math.atan(t / freedom**0.5)) / area_above(-math.pi / 2)


def check(recipe: str) -> None:
    """Refuses a recipe that sees test scores, and code that no commit holds.

    Raises:
        UsageError: The message says what to change.
    """
    values = Config(recipe=recipe).values
    for name in _LOOKING:
        if values[name]:
            raise UsageError(
                f"--recipe {recipe}: its {name} has scores decide during the training, "
                "where a record looks at the test images once, after it. Remove it."
            )
    ours = machine.ROOT / f"cifar10/config/recipes/{recipe}.toml"
    path = ours if ours.is_file() else Path(recipe).resolve()
    if is_code(values["model"]) or not machine.git("ls-files", str(path)):
        raise UsageError(
            f"--recipe {recipe}: its file and its model have to be in the commit. Put "
            "them into cifar10/config/recipes and cifar10/models, and commit them."
        )
    board = BOARD.relative_to(machine.ROOT)  # Rows may wait there to be committed.
    changed = machine.git("status", "--porcelain", "--", ".", f":(exclude){board}")
    if changed:
        raise UsageError(
            f"{changed}: a row names the commit that was trained, and these files "
            "differ from it. Commit or remove them."
        )


def train_once(child: Child, seed: int, made_by: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of a training, which an earlier start may have made.

    Args:
        child: The process that trains.
        seed: The training's.
        made_by: What has to be equal for a kept training to count, but for the seed.
    """
    of_this = {**made_by, "seed": seed}
    for line in filter(None, logs.read_lines(KEPT)):
        if line["made_by"] == of_this:
            show_progress(f"Seed {seed} was trained before: {KEPT}")
            return line["figures"]
    figures = child.ask("run", seed)
    KEPT.parent.mkdir(exist_ok=True)
    logs.append_line(KEPT, {"made_by": of_this, "figures": figures})
    return figures


def enter(result: Result, level: float, about: dict[str, Any]) -> None:
    """Prints a row, and enters it into the board if it is a record.

    Args:
        result: What was measured.
        level: The record's, in percent.
        about: What `machine.describe` returns.

    Raises:
        UsageError: The row is no record, or cannot be measured or written.
    """
    if result.problem:
        raise UsageError(f"Nothing was entered: {result.problem}.")
    scores = [100 * one for one in result.figures("accuracy_with_views")]
    joules = [one for one in result.figures("joules") if one is not None]
    # Virtual machines may name their processor no better than "Xeon".
    processor = [about["processor"], f"{about['cores']} cores", *about["bfloat16"]]
    versions = ("python", "tensorflow", "keras", "numpy")
    p = p_value(scores, level - _BELOW_LEVEL)
    row = {
        "record": f"{level:g} %",
        "recipe": result.row.name,
        "processor": ", ".join(
            [*(about["accelerators"] or processor), result.precision]
        ),
        "seconds (seeds)": report.mean_and_deviation(result.figures("seconds"), 1),
        "joules (seeds)": report.mean_and_deviation(joules, 0) if joules else "-",
        "accuracy (seeds)": report.mean_and_deviation(scores, 2, " %"),
        "p": f"{p:.2g}",
        "commit": _clean(about["commit"]),
        "date": about["date"][:10],
        "versions": ", ".join(f"{name} {about['versions'][name]}" for name in versions),
    }
    table = report.table([*row], [[*row.values()]])
    print(table)
    if not p < SIGNIFICANCE:
        raise UsageError(
            f"Nothing was entered: p = {p:.2g} is not below {SIGNIFICANCE}, so the "
            f"true mean may be {level - _BELOW_LEVEL:g} % or less. Train longer."
        )
    try:
        text = BOARD.read_text(encoding="utf-8")
        with BOARD.open("a", encoding="utf-8") as board:
            board.write("" if text.endswith("\n") else "\n")
            board.write(table.splitlines()[-1] + "\n")
    except OSError as error:
        raise UsageError(
            f"{BOARD} cannot be written: {reason(error)}. Enter the row above by hand."
        ) from error
    show_progress(f"The row was entered into {BOARD}. Commit it.")


def _clean(commit: str) -> str:
    return commit.removesuffix("-dirty")  # By the board's rows alone.


def main() -> None:
    """Trains, prints the row and enters it."""
    parser = report.build_parser("record", __doc__, has_rows=False)
    add = parser.add_argument
    add("--recipe", default="fast", help="what to train: a name, or a file")
    add("--max_steps", type=int, help="of each training, in place of the recipe's")
    add("--seeds", type=int, default=10, help="trainings, at least 2")
    add("--level", type=float, default=94.0, help="of the record, in percent")
    flags = parser.parse_args()
    # One score has no deviation and no p; the first step is not timed.
    report.check_at_least(2, flags, "seeds", "max_steps")
    if not 50 < flags.level < 100:
        raise UsageError(f"--level {flags.level}: give a percentage, such as 94.")
    check(flags.recipe)
    about = machine.describe()
    dataset = datasets.find("cifar10", flags.data_dir)
    name = flags.recipe
    if flags.max_steps:
        name += f", {flags.max_steps} steps"
    options = {"recipe": flags.recipe, "dataset": dataset, "steps": flags.max_steps}
    made_by = {**about, "date": "", "commit": _clean(about["commit"]), "recipe": name}
    [result] = measure_in_turn(
        [Row(name, OURS, options)],
        flags.seeds,
        prepare=lambda *_: None,
        measure=lambda _, child, seed: train_once(child, seed, made_by),
        patience=PATIENCE_SECONDS,
    )
    enter(result, flags.level, about)


if __name__ == "__main__":
    entry_point.run_program(main)
