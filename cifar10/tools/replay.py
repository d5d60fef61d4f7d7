"""`python -m cifar10 replay`: recomputes a run's steps and compares the results."""

import argparse
import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar10 import files
from cifar10.config import flags, layout
from cifar10.errors import UsageError
from cifar10.process import entry_point
from cifar10.run_directory import restoring
from cifar10.run_directory.lock import is_locked

if TYPE_CHECKING:
    from cifar10.training.replay import Difference, Replay

HELP = "recompute steps of a run, and find the images that broke it"
DESCRIPTION = """Recomputes steps of a run, and compares them with its records.

    python -m cifar10 replay runs/cifar10_train --steps 1001:1100 --find

Says whether they are equal, equal but for rounding, or different (exit code 1).
Writes nothing to the run.
"""


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    parser.add_argument("--steps", required=True, help="FIRST:LAST, such as 1001:1100")
    parser.add_argument("--find", action="store_true", help="name the step at fault")
    parser.add_argument("--images", help="folder for pages with each step's images")
    replay, given = open_run(parser, words)
    first, last = window(replay, given["steps"])
    if (folder := given["images"]) is not None:
        if not folder:
            raise UsageError("--images: the value is empty. Name a folder.")
        folder = layout.absolute_path(folder)
        files.check_writable(folder, "--images")
    if given["find"]:
        step, loss, norm = replay.find(first, last)
        batches = next(replay.steps(step, step))
        _write_page(folder, replay, batches)
        print(f"Step {step:,}: cross entropy {loss:.3g}, norm {norm:.3g}, mostly from:")
        ranked = sorted(replay.images(batches), key=lambda one: -one[0])
        for norm, loss, name, _ in ranked[:4]:
            print(f"  {name}: norm {norm:.3g}, cross entropy {loss:.3g}")
        return 0
    worst, begins, until = compare(replay, first, last, folder)
    differs, far, bound, step, place = worst
    verdict = "different" if differs else "equal but for rounding" if far else "equal"
    said = f"Steps {first:,} to {until:,} are {verdict}"
    if far:
        said += (
            f": from step {begins:,} on, and by {far:.2g} in step {step:,} ({place}), "
            f"where rounding explains up to {bound:g}"
        )
    print(f"{said}.")
    if not differs and until < last:
        print(f"The run has no record of later steps to compare, to {last:,}.")
    if replay.why_not_exact:
        print(f"Not compared bit for bit, {replay.why_not_exact}.")
    return int(differs)


def open_run(
    parser: argparse.ArgumentParser, words: Sequence[str], *, what_if: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Parses a command line; returns the run's `Replay` and the options by name.

    With `what_if`, returns a `WhatIf`: of the original run if RUN is from `whatif`.
    """
    parser.add_argument("run", metavar="RUN", help="directory of the run")
    parser.add_argument("--num_gpus", type=int, help="number of towers")
    parser.add_argument("--data_dir", help="directory of the data set")
    parser.add_argument("--trust_model", help="module:function of a model you trust")
    given = flags.parse(parser, words)
    run = layout.absolute_path(given["run"])
    for name in ("num_gpus", "segments"):
        if (number := given.get(name)) is not None and number < 1:
            raise UsageError(f"--{name} {number}: give at least 1.")
    recorded = restoring.check_usable(str(run), given["trust_model"])
    if what_if and recorded.facts.what_if:
        if not recorded.is_own:
            raise UsageError(f"{run} was not written by you, or was edited.")
        towers = recorded.facts.what_if.get("towers", 0)
        given["num_gpus"] = given["num_gpus"] or int(towers) or None
        run = Path(recorded.facts.what_if["run"])
        recorded = restoring.check_usable(str(run), given["trust_model"])
    if is_locked(run):
        raise UsageError(f"{run} is still being trained. Wait until training ends.")
    entry_point.import_tensorflow(deterministic=recorded.config.speed.deterministic)
    from cifar10.training.replay import Replay
    from cifar10.training.what_if import WhatIf

    kind = WhatIf if what_if else Replay
    return kind(run, given["num_gpus"], given["data_dir"]), given


def window(replay: "Replay", words: str) -> tuple[int, int]:
    """Returns the first and the last step that --steps names."""
    found = re.fullmatch("([0-9]{1,12}):([0-9]{1,12})", words)
    first, last = map(int, found.groups()) if found else (0, 0)
    origin, most = replay.origin, replay.recorded.config.run.max_steps
    if not origin < first <= last <= most:
        possible = f"steps {origin + 1} to {most}"
        raise UsageError(f"--steps {words}: give FIRST:LAST of {possible}.")
    return first, last


def compare(
    replay: "Replay", first: int, last: int, folder: Path | None = None
) -> "tuple[Difference, int | None, int]":
    """Recomputes steps until one differs by more than rounding.

    Returns the worst difference, the first step with any, and the last recorded step.
    """
    if not replay.is_recorded(first, last):
        raise UsageError(f"--steps {first}:{last}: no step is logged. Give more steps.")
    worst: list[Difference] = []
    begins, compared = None, first
    for batches in replay.steps(first, last):
        _write_page(folder, replay, batches)
        if found := [*replay.compare(batches)]:
            compared = replay.step
        worst = sorted([*worst, *found])[-1:]
        begins = begins or (replay.step if worst and worst[0][1] else None)
        if any(differs for differs, *_ in worst):
            break
    return worst[0], begins, compared


def _write_page(folder: Path | None, replay: "Replay", batches: Any) -> None:
    """Writes a page of the images of the next step, with their names and losses."""
    if folder is None:
        return
    page = '<!doctype html><meta charset="utf-8">\n'
    for _, loss, name, png in replay.images(batches):
        coded = base64.b64encode(png).decode()
        page += '<p style="display: inline-block; margin: 8px"><img height="96" src="'
        page += f'data:image/png;base64,{coded}"><br>{html.escape(name)}: {loss:.3g}\n'
    path = folder / f"step-{replay.step + 1:08d}.html"
    files.write_output(path, "--images", page.encode(errors="surrogateescape"))
