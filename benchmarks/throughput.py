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
import sys
from collections.abc import Callable, Sequence

from benchmarks import flags as shared, machine, parity, plot, report
from benchmarks.child import Child, noting_problems, tell
from benchmarks.rows import BATCH_SIZE, DATASETS, Result, Row, all_rows
from cifar10.input import datasets
from cifar10.process import entry_point

_UNTIMED_STEPS = 10

Runner = Callable[[int, int], float]


def compare(
    rows: Sequence[Row],
    found: dict[str, datasets.Dataset],
    *,
    repeats: int,
    steps: int,
    package: str = "benchmarks.rivals",
) -> list[Result]:
    """Starts the rivals, checks that they agree and lets them take turns.

    Args:
        rows: What to measure.
        found: The data sets by a row's `input`.
        repeats: Timed windows of each row.
        steps: Steps in a window.
        package: Where the rows' modules are.

    Returns:
        One result for each row; those that could not be measured say why.
    """
    results = [Result(row) for row in rows]
    runners: list[tuple[Result, Runner]] = []
    with contextlib.ExitStack() as stack:
        ours = _reference(package) if any(row.is_training for row in rows) else None
        for result in results:
            with noting_problems(result):
                child = stack.enter_context(_start(result.row, found, package))
                result.precision = child.precision
                if ours and result.row.is_training:
                    answer = child.ask("check", ours.values, ours.images, ours.labels)
                    result.agreement = parity.compare(ours, *answer)
                    result.problem = parity.complaint(result.agreement, child.precision)
                runners.append((result, _runner(child)))
            tell(f"{result.row.title}: {result.problem or 'ready'}")
        take_turns(runners, repeats, steps)
    return results


def take_turns(
    runners: Sequence[tuple[Result, Runner]], repeats: int, steps: int
) -> None:
    """Times the rivals in turn, as long as they have no problem.

    Args:
        runners: Results, to which the rates are added, each with a function from the
            numbers of untimed and timed steps to the seconds of the latter.
        repeats: Timed windows of each.
        steps: Steps in a window.
    """
    for number in range(repeats):
        for result, run in runners:
            if result.problem:
                continue
            timed = result.row.steps(steps)
            with noting_problems(result):
                seconds = run(result.row.steps(_UNTIMED_STEPS), timed)
                result.rates.append(timed * result.row.images_per_step / seconds)
            if result.problem:
                tell(f"{result.row.title}: {result.problem}")
        tell(f"round {number + 1} of {repeats} done")


def _start(row: Row, found: dict[str, datasets.Dataset], package: str) -> Child:
    dataset = found.get(row.input)
    options = {**row.options, "dataset": dataset} if dataset else row.options
    return Child(f"{package}.{row.module}", options)


def _runner(child: Child) -> Runner:
    return lambda untimed, timed: child.ask("run", untimed, timed)


def _reference(package: str) -> parity.Reference:
    options = {"towers": 1, "batch_size": BATCH_SIZE, "precision": "float32"}
    with Child(f"{package}.towers", options) as child:
        return parity.reference(child.ask, BATCH_SIZE)


def _find_data(rows: Sequence[Row], data_dir: str | None) -> dict:
    """Returns the data sets that the rows need, by their `input`."""
    found = {}
    for kind in {row.input for row in rows}:
        name = DATASETS[kind]
        if name == "cifar10":
            found[kind] = datasets.find(name, data_dir)
        elif name:  # The stand-in keeps out of a folder of real data.
            found[kind] = datasets.find(name)
    return found


def _parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", help="folder of the real CIFAR-10")
    parser.add_argument("--repeats", type=int, default=9, help="timed windows of each")
    parser.add_argument(
        "--steps", type=int, default=30, help="steps of 128 images in a window"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="rows with a part of these names; a wrong one lists all",
    )
    shared.add_files(parser)
    flags = parser.parse_args()
    shared.check_at_least_one(flags, "repeats", "steps")
    shared.check_files(flags)
    return flags


def main() -> None:
    """Runs the comparison, prints its tables and writes the files asked for."""
    flags = _parse_flags()
    rows = shared.select(all_rows(), flags.only, lambda row: row.title)
    found = _find_data(rows, flags.data_dir)
    about = {
        **machine.describe(),
        "repeats": flags.repeats,
        "steps": flags.steps,
        "data": {kind: dataset.description for kind, dataset in found.items()},
    }
    results = compare(rows, found, repeats=flags.repeats, steps=flags.steps)
    text = report.markdown(results, about)
    print(text)
    if flags.markdown:
        flags.markdown.write_text(text + "\n", encoding="utf-8")
    if flags.json:
        flags.json.write_text(report.as_json(results, about), encoding="utf-8")
    if flags.plot and (problem := plot.draw(results, about, flags.plot)):
        print(f"No plot: {problem}", file=sys.stderr)


if __name__ == "__main__":
    entry_point.run_program(main)
