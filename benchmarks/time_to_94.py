"""Trains on CIFAR-10 to the end of a recipe, in turn with airbench94 in PyTorch.

    python -m benchmarks.time_to_94 --data_dir ~/.cache/cifar10 --seeds 10

Before anything is timed, both compute loss, gradients and first update of the airbench
network from the same values and images in float32, and who does not agree is not timed.
Then they train in turn, seed by seed, so that a machine whose speed drifts treats them
alike. The clock is airbench94's: whitening, training and scoring the six views, without
tracing, compiling, saving, and the score without views. Quote the ratios, not the
absolute figures.

A training takes minutes on a CPU. For a quick look, whose accuracy says nothing:
--seeds 1 --steps 4 --images 200
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import flags as shared, machine, parity, report
from benchmarks.child import Child, noting_problems, tell
from cifar10.config.config import read_recipe
from cifar10.errors import UsageError
from cifar10.input import datasets
from cifar10.process import entry_point

PATIENCE_SECONDS = 2 * 3600.0  # Of a training on a CPU that others use too.
# Airbench's published rules as a recipe of ours, which shows that they are the same.
PUBLISHED = Path(__file__).with_name("airbench94.toml")
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


@dataclasses.dataclass
class Result:
    """What became of a row.

    Attributes:
        name: For people.
        module: Under `benchmarks.rivals`.
        options: For the module's `start`; the data set comes on top.
        precision: How it computed.
        problem: Why it was not measured, in one line; empty if it was.
        facts: As `airbench.Airbench.facts` returns them.
        agreement: How far loss and gradients are from ours; None for ours.
        update: How far the variables' changes in the first update are.
        runs: What each seed's training gave, as `airbench.Airbench.run` returns it.
    """

    name: str
    module: str
    options: dict[str, Any]
    precision: str = ""
    problem: str = ""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    agreement: parity.Agreement | None = None
    update: parity.Agreement | None = None
    runs: list[dict[str, float]] = dataclasses.field(default_factory=list)

    @property
    def is_measured(self) -> bool:
        """Whether there are figures to show."""
        return bool(self.runs) and not self.problem

    def of_runs(self, figure: str) -> list[float]:
        """Returns one figure of every training."""
        return [run[figure] for run in self.runs]


def all_rows(
    recipes: Sequence[str], steps: int | None = None, images: int | None = None
) -> list[Result]:
    """Returns a row for each recipe of ours, and airbench's.

    Args:
        recipes: As `--recipe` of train.py takes them.
        steps: Updates of each training; None for a whole one.
        images: Images in a step; None for the rows' own.
    """
    shorter = {"steps": steps, "batch_size": images}
    given = {name: value for name, value in shorter.items() if value}
    ours = [
        Result(f"ours, {recipe}", "recipe", {"recipe": recipe, **given})
        for recipe in recipes
    ]
    return [*ours, Result("airbench, PyTorch", "airbench", given)]


def compare(
    results: Sequence[Result],
    dataset: datasets.Dataset,
    *,
    seeds: int,
    package: str = "benchmarks.rivals",
) -> None:
    """Starts the rows, checks that airbench is ours, and lets all train in turn.

    Args:
        results: The rows, to which everything that is found is added.
        dataset: What they train on.
        seeds: Trainings of each.
        package: Where the rows' modules are.
    """
    children = []
    with contextlib.ExitStack() as stack:
        for result in results:
            with noting_problems(result):
                child = stack.enter_context(
                    _start(package, result.module, result.options, dataset)
                )
                result.precision = child.precision
                result.facts = child.ask("facts")
                if result.module == "airbench":
                    _check(result, child, package, dataset)
                children.append((result, child))
            tell(f"{result.name}: {result.problem or result.precision}")
        for seed in range(seeds):
            for result, child in children:
                if result.problem:
                    continue
                with noting_problems(result):
                    result.runs.append(child.ask("run", seed))
                tell(f"seed {seed}, {result.name}: {result.problem or result.runs[-1]}")


def _start(
    package: str, module: str, options: dict[str, Any], dataset: datasets.Dataset
) -> Child:
    options = {**options, "dataset": dataset}
    return Child(f"{package}.{module}", options, PATIENCE_SECONDS)


def _check(
    result: Result, child: Child, package: str, dataset: datasets.Dataset
) -> None:
    """Compares one step of airbench with ours by the same rules."""
    published = {"recipe": str(PUBLISHED)}
    with _start(package, "recipe", published, dataset) as ours:
        batch = ours.ask("reference", _COMPARED_IMAGES)
        expected = ours.ask("check", *batch)
    agreements = differences(batch, expected, child.ask("check", *batch))
    result.agreement, result.update = agreements
    result.problem = complaint(*agreements)


def complaint(agreement: parity.Agreement, update: parity.Agreement) -> str:
    """Returns why these are not the same network and rules, nothing if they are."""
    # Written so that a difference that is not a number is complained of.
    if not agreement.loss <= LOSS_BOUND:
        return f"not the same network: its loss differs by {agreement.loss:.1g}"
    for what, found in (("gradient", agreement), ("first update", update)):
        if not found.gradient <= BOUND:
            return f"the {what} of {found.variable} differs by {found.gradient:.1g}"
    return ""


Step = tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]


def differences(
    batch: tuple[dict[str, np.ndarray], np.ndarray, np.ndarray],
    expected: Step,
    found: Step,
) -> tuple[parity.Agreement, parity.Agreement]:
    """Measures how far a step is from ours.

    Args:
        batch: The values by name, the images and the labels that both began with.
        expected: The loss, the gradients and the updated values of ours.
        found: Those of the other.

    Returns:
        The differences of loss and gradients, and of the changes by the update.
    """
    ours = parity.Reference(*batch, *expected[:2])
    values = batch[0]
    changes = [
        {name: value - values[name] for name, value in updated.items()}
        for updated in (expected[2], found[2])
    ]
    moved = dataclasses.replace(ours, gradients=changes[0])
    loss, gradients = found[:2]
    return (
        parity.compare(ours, loss, gradients),
        parity.compare(moved, loss, changes[1]),
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
    parts = [
        "  \n".join([report.where(about), f"Data: {about['data']}.", length]),
        _table(results),
        _CLOCK,
    ]
    for result in results:
        if result.agreement and result.update:
            parts.append(
                f"{result.name}, in float32 and with our approximation of the GELU, "
                "against ours by the published rules: loss within "
                f"{result.agreement.loss:.1g} (bound {LOSS_BOUND:g}), every gradient "
                f"within {result.agreement.gradient:.1g} and every first update within "
                f"{result.update.gradient:.1g} (bounds {BOUND:g})."
            )
        if tried := result.facts.get("tried"):
            steps = "; ".join(f"{name}: {took}" for name, took in tried.items())
            parts.append(f"{result.name}, tried before the training: {steps}.")
    return "\n\n".join(parts)


def _table(results: Sequence[Result]) -> str:
    header = ["what", "precision", "seconds: mean (deviation)", "times airbench's"]
    header += ["six views", "one view", "MFLOP an image", "PFLOP"]
    airbench = next((one for one in results if one.module == "airbench"), None)
    lines = []
    for one in results:
        if not one.is_measured:
            problem = one.problem or "not measured"
            lines.append([one.name, one.precision or "-", problem, *["-"] * 5])
            continue
        operations = one.facts["operations"]
        ratio = ratio_of_seconds(one, airbench)
        lines.append(
            [
                one.name,
                one.precision,
                _mean(one.of_runs("seconds"), ""),
                "-" if ratio is None else f"{ratio:.2f}",
                _mean(one.of_runs("accuracy_with_views"), "%"),
                _mean(one.of_runs("accuracy"), "%"),
                f"{operations / one.facts['images'] / 1e6:,.0f}",
                f"{operations / 1e15:.3g}",
            ]
        )
    return report.table(header, lines)


def ratio_of_seconds(result: Result, airbench: Result | None) -> float | None:
    """Returns the median over the seeds of a row's seconds over airbench's.

    Both are of one turn, so that a drift of the machine cancels out. None where one of
    them was not measured.
    """
    if not airbench or not airbench.is_measured or not result.is_measured:
        return None
    pairs = zip(result.of_runs("seconds"), airbench.of_runs("seconds"), strict=True)
    return statistics.median(own / other for own, other in pairs)


def _mean(figures: Sequence[float], unit: str) -> str:
    """Returns the mean and the deviation of a sample; "%" is of parts of one."""
    scale, digits = (100.0, 2) if unit else (1.0, 1)
    mean = f"{statistics.mean(figures) * scale:,.{digits}f}{unit and ' ' + unit}"
    if len(figures) < 2:
        return mean
    return f"{mean} ({statistics.stdev(figures) * scale:.{digits}f})"


def as_json(results: Sequence[Result], about: dict[str, Any]) -> str:
    """Returns everything that was measured, training by training."""
    rows = [dataclasses.asdict(result) for result in results]
    return json.dumps({**about, "rows": rows}, indent=2) + "\n"


def draw(results: Sequence[Result], about: dict[str, Any], path: Path) -> str:
    """Draws a point for each training: its seconds and its accuracy with views.

    Args:
        results: The rows.
        about: As for `markdown`.
        path: The PNG file to write.

    Returns:
        Why there is no picture; empty if there is one.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed: pip install -e .[peers]"
    shown = [one for one in results if one.is_measured]
    if not shown:
        return "nothing was measured"
    # Not pyplot, which would look for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for one in shown:
        percent = [100 * part for part in one.of_runs("accuracy_with_views")]
        label = f"{one.name} ({one.precision})"
        axes.scatter(one.of_runs("seconds"), percent, label=label)
    axes.axhline(94, color="0.6", linestyle=":")
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of whitening, training and scoring")
    axes.set_ylabel("accuracy with six views, %")
    axes.legend()
    axes.set_title(
        f"{about['processor']}, {about['cores']} cores; commit {about['commit']}, "
        f"{about['date'][:10]}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=120, format="png")
    return ""


def _parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", help="folder of the real CIFAR-10")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each row")
    parser.add_argument(
        "--rows", help="parts of the names of rows, separated by commas; default: all"
    )
    parser.add_argument(
        "--recipe",
        default="fast",
        help="ours to train, separated by commas: names or files (default: fast)",
    )
    parser.add_argument(
        "--steps", type=int, help="for a look: updates, after which the rates are zero"
    )
    parser.add_argument("--images", type=int, help="for a look: images in a step")
    shared.add_files(parser)
    flags = parser.parse_args()
    given = [name for name in ("steps", "images") if getattr(flags, name) is not None]
    shared.check_at_least_one(flags, "seeds", *given)
    if flags.steps == 1:
        raise UsageError("--steps 1: the first one is not timed; give at least 2.")
    flags.recipe = flags.recipe.split(",")
    for recipe in flags.recipe:
        read_recipe(recipe)
    shared.check_files(flags)
    return flags


def main() -> None:
    """Runs the comparison, prints its table and writes the files asked for."""
    flags = _parse_flags()
    rows = all_rows(flags.recipe, flags.steps, flags.images)
    wanted = flags.rows.split(",") if flags.rows else []
    rows = shared.select(rows, wanted, lambda row: row.name, "rows")
    dataset = datasets.find("cifar10", flags.data_dir)
    about = {
        **machine.describe(),
        "data": dataset.description,
        **{name: getattr(flags, name) for name in ("seeds", "steps", "images")},
    }
    compare(rows, dataset, seeds=flags.seeds)
    text = markdown(rows, about)
    print(text)
    if flags.markdown:
        flags.markdown.write_text(text + "\n", encoding="utf-8")
    if flags.json:
        flags.json.write_text(as_json(rows, about), encoding="utf-8")
    if flags.plot and (problem := draw(rows, about, flags.plot)):
        print(f"No plot: {problem}", file=sys.stderr)


if __name__ == "__main__":
    entry_point.run_program(main)
