"""Measures what sections save and cost: PartialFlow's comparison, as a command.

    python -m benchmarks.sections --data_dir DIR

Trains the same residual network on the same real images whole, in sections, and with
TensorFlow's own tf.recompute_grad, one step of each in turn, each in a process of its
own. Prints memory above that after a step of a few images, step time and losses, and
the peak memory of a whole `train.py` above that with a few images; writes them as JSON
and as a picture. Ratios are medians over the rounds: trust those, not absolute figures.
With --models it compares what `python -m cifar10 plan` says with the memory above that
before the first step, for each of --batch_sizes and --sections.

The default takes 6 minutes and 6 GB on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import flags as shared, machine
from benchmarks.child import Child, RivalError, tell
from cifar10.errors import UsageError
from cifar10.input import datasets, records
from cifar10.process import entry_point

_MODULE = "benchmarks.rivals.sectioned"
# As in PartialFlow's comparison.
_SIDE = 28
_UNTIMED_ROUNDS = 2
_FEW_IMAGES = 8
_STEPS = 4  # Of a whole training.
_WHOLE = "whole"


@dataclasses.dataclass
class Row:
    """One way to train, and what was measured of it.

    Attributes:
        name: For people.
        sections: How many.
        recomputed: Whether by `tf.recompute_grad`.
        begin: The layers that its sections begin with.
        planned: Bytes, as planned.
        peak: Bytes of a step, measured.
        process: Bytes of a whole training, measured; None with `tf.recompute_grad`,
            which no flag requests.
        seconds: Of each timed step.
        losses: Of each step.
        problem: Why it was not measured.
    """

    name: str
    sections: int
    recomputed: bool
    begin: list[str] = dataclasses.field(default_factory=list)
    planned: int = 0
    peak: int = 0
    process: int | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    problem: str = ""


def rows_of(counts: Sequence[int]) -> list[Row]:
    """Returns the rows: whole, then in sections and recomputed for each number."""
    rows = [Row(_WHOLE, 1, recomputed=False)]
    for count in counts:
        rows.append(Row(f"{count} sections", count, recomputed=False))
        rows.append(Row(f"{count} x tf.recompute_grad", count, recomputed=True))
    return rows


def compare(rows: Sequence[Row], rounds: int, **options: Any) -> None:
    """Lets all rows take turns, step by step, and notes what they take.

    Args:
        rows: What to measure; the results are added.
        rounds: Timed steps of each.
        **options: Further arguments of `rivals.sectioned.Sectioned`.
    """
    with contextlib.ExitStack() as stack:
        children: list[tuple[Row, Child]] = []
        for row in rows:
            try:
                arguments = {"sections": row.sections, "recomputed": row.recomputed}
                child = stack.enter_context(Child(_MODULE, {**options, **arguments}))
                row.planned, row.begin = child.ask("plan")
                children.append((row, child))
            except RivalError as error:
                row.problem = str(error)
        for number in range(_UNTIMED_ROUNDS + rounds):
            for row, child in children:
                _step(row, child, timed=number >= _UNTIMED_ROUNDS)
            tell(f"round {number + 1} of {_UNTIMED_ROUNDS + rounds} done")


def _step(row: Row, child: Child, *, timed: bool) -> None:
    if row.problem:
        return
    try:
        seconds, loss = child.ask("step")
        row.peak = child.ask("peak")
    except RivalError as error:
        row.problem = str(error)
        return
    row.losses.append(loss)
    if timed:
        row.seconds.append(seconds)


def measure_processes(
    rows: Sequence[Row], batch_size: int, options: Sequence[str]
) -> None:
    """Notes the peak memory of whole trainings above that of one with a few images.

    Args:
        rows: What to measure; the results are added.
        batch_size: Images of a batch.
        options: Further flags of `train.py`.
    """
    least = _process_peak(_FEW_IMAGES, options)
    for row in rows:
        if not row.recomputed:
            cut = ["--sections", str(row.sections)] if row.sections > 1 else []
            row.process = _process_peak(batch_size, [*options, *cut]) - least


def _process_peak(batch_size: int, options: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        command = [sys.executable, str(Path(__file__).parents[1] / "train.py")]
        command += ["--batch_size", str(batch_size), "--max_steps", str(_STEPS)]
        command += ["--train_dir", f"{folder}/run", *options]
        with subprocess.Popen(  # noqa: S603 - our own.
            command, stdout=output, stderr=output
        ) as process:
            # Not `wait`, because only this tells what the process has used.
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace"))
            raise UsageError(f"{' '.join(command)} ended with {process.returncode}.")
    return used.ru_maxrss * 1024


def table(rows: Sequence[Row]) -> str:
    """Returns the comparison as Markdown."""
    head = (
        "",
        "step, ms: median (least to most)",
        "time, to whole",
        "memory, MB",
        "memory, to whole",
        "whole process, MB",
        "whole process, to whole",
        "largest difference of losses",
    )
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    whole = rows[0]
    for row in rows:
        if row.problem or whole.problem:
            lines.append(f"| {row.name} | {row.problem or '-'} | | | | | | |")
            continue
        milliseconds = [1e3 * seconds for seconds in row.seconds]
        process = "- | -"
        if row.process and whole.process:
            ratio = row.process / whole.process
            process = f"{row.process / 1e6:,.0f} | {ratio:.3f}"
        difference = max(
            abs(one - other) / abs(other)
            for one, other in zip(row.losses, whole.losses, strict=True)
        )
        lines.append(
            f"| {row.name} | {statistics.median(milliseconds):,.0f} "
            f"({min(milliseconds):,.0f} to {max(milliseconds):,.0f}) "
            f"| {time_ratio(row, whole):.3f} | {row.peak / 1e6:,.0f} "
            f"| {row.peak / whole.peak:.3f} | {process} | {difference:.0e} |"
        )
    return "\n".join(lines)


def time_ratio(row: Row, whole: Row) -> float:
    """Returns the median of a step's time over that of the whole, round by round."""
    return statistics.median(
        one / other for one, other in zip(row.seconds, whole.seconds, strict=True)
    )


def draw(rows: Sequence[Row], about: dict[str, Any], path: Path) -> str:
    """Draws PartialFlow's three plots, and the memory beside them.

    Args:
        rows: What was measured; the first one is whole.
        about: What `machine.describe` returns.
        path: The PNG file to write.

    Returns:
        Why there is no picture; empty if there is one.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed: pip install -e .[peers]"
    if rows[0].problem:
        return f"the whole step was not measured: {rows[0].problem}"
    # Not pyplot, which would look for a display.
    from matplotlib.figure import Figure

    shown = [row for row in rows if not row.problem]
    whole = shown[0]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    (loss, time), (overhead, memory) = figure.subplots(2, 2)
    for number, row in enumerate(shown):
        style = ":" if row.recomputed else "-"
        loss.plot(row.losses, style, color=f"C{number}", label=row.name)
        time.plot([1e3 * one for one in row.seconds], style, color=f"C{number}")
        if row is not whole:
            ratios = [
                100 * (one / other - 1)
                for one, other in zip(row.seconds, whole.seconds, strict=True)
            ]
            median = f"median {100 * (time_ratio(row, whole) - 1):+.0f} %"
            overhead.plot(ratios, style, color=f"C{number}", label=median)
    loss.set(title="loss", xlabel="step")
    loss.legend(fontsize="small")
    time.set(title="time of a step, ms", xlabel="timed step")
    time.set_ylim(bottom=0)
    overhead.set(title="time over that of the whole, %", xlabel="timed step")
    overhead.axhline(0, color="0.7")
    overhead.legend(fontsize="small")
    bars = memory.barh(
        [row.name for row in shown],
        [row.peak / 1e6 for row in shown],
        color=[f"C{number}" for number in range(len(shown))],
    )
    memory.bar_label(bars, [f" {row.peak / whole.peak:.0%}" for row in shown])
    memory.invert_yaxis()
    memory.margins(x=0.15)
    memory.set(title="memory above the start, MB")
    figure.suptitle(
        f"{about['model']}, {about['batch_size']:,} images, {about['precision']}; "
        f"{about['processor']}, {about['cores']} cores; commit {about['commit']}, "
        f"{str(about['date'])[:10]}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=120, format="png")
    return ""


def check_plans(
    models: Sequence[str], sizes: Sequence[int], counts: Sequence[int], **options: Any
) -> list[dict[str, Any]]:
    """Compares planned with measured memory.

    Args:
        models: As `--model`.
        sizes: Images of a batch.
        counts: Numbers of sections.
        **options: Further arguments of `rivals.sectioned.Sectioned`.

    Returns:
        An object for each model, size and number.
    """
    found = []
    for model in models:
        for size in sizes:
            for count in counts:
                row = Row(_WHOLE, count, recomputed=False)
                compare([row], 0, model=model, batch_size=size, warm=False, **options)
                ratio = row.planned / row.peak if row.peak else None
                found.append(
                    {
                        "model": model,
                        "batch_size": size,
                        "sections": count,
                        "planned": row.planned,
                        "measured": row.peak,
                        "ratio": ratio,
                        "problem": row.problem,
                    }
                )
                tell(
                    f"{model}, {size:,} images, {count} sections: planned "
                    f"{row.planned / 1e6:,.0f} MB, measured {row.peak / 1e6:,.0f} MB"
                    + (f", {ratio:.2f}" if ratio else f" {row.problem}")
                )
    return found


def plan_table(found: Sequence[dict[str, Any]]) -> str:
    """Returns the comparison of plans as Markdown."""
    lines = [
        "| model | images | sections | planned, MB | measured, MB | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        ratio = f"{one['ratio']:.2f}" if one["ratio"] else one["problem"]
        lines.append(
            f"| {one['model']} | {one['batch_size']:,} | {one['sections']} | "
            f"{one['planned'] / 1e6:,.0f} | {one['measured'] / 1e6:,.0f} | {ratio} |"
        )
    return "\n".join(lines)


def real_images(data_dir: str | None, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns real images, standardized, cut to 28 x 28, and their labels."""
    dataset = datasets.find("cifar10", data_dir)
    images, labels = dataset.read("train")
    if count > len(images):
        raise UsageError(f"There are {len(images):,} images, and {count:,} are needed.")
    edge = (records.HEIGHT - _SIDE) // 2
    cut = images[:count, edge : edge + _SIDE, edge : edge + _SIDE].astype(np.float32)
    mean = cut.mean(axis=(1, 2, 3), keepdims=True)
    deviation = cut.std(axis=(1, 2, 3), keepdims=True)
    return (cut - mean) / deviation, labels[:count]


def _parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--data_dir", help="folder of the real CIFAR-10")
    flag("--model", default="resnet", help="as --model of train.py")
    flag("--depth", type=int, help="as --depth of train.py")
    flag("--width", type=int, help="as --width of train.py")
    flag("--precision", default="float32", help="as --precision of train.py")
    flag("--batch_size", type=int, default=1000, help="images of a step")
    flag("--sections", type=int, nargs="+", default=[2, 4], help="how many")
    flag("--rounds", type=int, default=20, help="timed steps of each")
    flag("--models", nargs="+", help="compare plans with memory for these models")
    flag("--batch_sizes", type=int, nargs="+", default=[128, 500, 1000])
    shared.add_files(parser)
    flags = parser.parse_args()
    shared.check_at_least_one(flags, "batch_size", "rounds")
    if min(flags.sections) < 1 or min(flags.batch_sizes) < 1:
        raise UsageError("--sections and --batch_sizes are at least 1.")
    shared.check_files(flags)
    return flags


def _training_flags(flags: argparse.Namespace) -> list[str]:
    names = ("data_dir", "model", "depth", "width", "precision")
    given = {name: getattr(flags, name) for name in names}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def main() -> None:
    """Runs the comparison, prints its table and writes the files asked for."""
    flags = _parse_flags()
    about = {**machine.describe(), **vars(flags)}
    options: dict[str, Any] = {
        "precision": flags.precision,
        "options": {"depth": flags.depth, "width": flags.width},
    }
    if flags.models:
        count = 2 * max(flags.batch_sizes)
        images, labels = real_images(flags.data_dir, count)
        options |= {"images": images, "labels": labels}
        found = check_plans(flags.models, flags.batch_sizes, flags.sections, **options)
        text, results = plan_table(found), found
    else:
        rows = rows_of(flags.sections)
        # First: a process begins with the peak of the one that starts it.
        measure_processes(rows, flags.batch_size, _training_flags(flags))
        count = (_UNTIMED_ROUNDS + flags.rounds) * flags.batch_size
        images, labels = real_images(flags.data_dir, count)
        options |= {"images": images, "labels": labels}
        options |= {"model": flags.model, "batch_size": flags.batch_size}
        compare(rows, flags.rounds, warm=True, **options)
        text, results = table(rows), [dataclasses.asdict(row) for row in rows]
    print(text)
    if flags.markdown:
        flags.markdown.write_text(text + "\n", encoding="utf-8")
    if flags.json:
        flags.json.write_text(
            json.dumps({**about, "rows": results}, indent=2, default=str) + "\n",
            encoding="utf-8",
        )
    if flags.plot and not flags.models and (problem := draw(rows, about, flags.plot)):
        print(f"No plot: {problem}", file=sys.stderr)


if __name__ == "__main__":
    entry_point.run_program(main)
