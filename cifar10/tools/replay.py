"""`python -m cifar10 replay`: recomputes a run's steps and compares the results."""

import argparse
import contextlib
import csv
import dataclasses
import functools
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cifar10.config import flags, layout, run_config
from cifar10.config.options import Checked, Count, Form
from cifar10.errors import UsageError, say
from cifar10.process import entry_point, files
from cifar10.run_directory import restoring, starting
from cifar10.run_directory.lock import is_locked

if TYPE_CHECKING:
    from cifar10.training.replay import Replay

HELP = "recompute steps of a run, and find the images that broke it"
DESCRIPTION = """Recomputes a run's steps and compares them with log and checkpoints.

    python -m cifar10 replay runs/cifar10_train --steps 1001:1100
    python -m cifar10 replay runs/cifar10_train --steps 1001:1100 --find

Begins at the checkpoint before the first step, on any number of towers, and
writes nothing to the run. On the same kind of machine a --deterministic run is
recomputed to the last bit. Otherwise, rounding may cause differences up to a
bound. --find names the first step whose gradient is not finite or jumps, and
the images that cause this. Exit code 1: something differs, or --find found
nothing.
"""

_MOST = 4  # Images that --find names.
_COLUMNS, _LETTERS = 3, 22  # Columns of a sheet, and letters of an image's name.

_Options = TypeVar("_Options", bound="ReplayOptions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayOptions(Checked):
    """Options for rebuilding the training of a recorded run.

    Attributes:
        num_gpus: number of towers (default: the run's)
        data_dir: directory of the data set (default: the run's)
        trust_model: module:function of a model whose code you trust, if you did not
            train the run (default: none)
    """

    num_gpus: Count | None = None
    data_dir: str | None = None
    trust_model: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ReplayOptions):
    """What to recompute.

    Attributes:
        steps: FIRST:LAST, the steps to compare, for example 1001:1100
        find: find the first step whose gradient jumps, and the images that cause it
        images: folder for a PNG and a CSV file of each step's images, with their names
            and losses (default: none)
    """

    steps: Annotated[
        str, Form(r"[1-9]\d{0,11}:[1-9]\d{0,11}", "FIRST:LAST, such as 1001:1100")
    ]
    find: bool = False
    images: str | None = None


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    run, options = parse(parser, words, Options)
    replay = open_run(run, options)
    first, last = map(int, options.steps.split(":"))
    known = [0, *replay.logged, *replay.saved]
    if options.find:
        known = [first, replay.recorded["max_steps"]]
    if last > max(known) or not any(first <= step <= last for step in known):
        raise UsageError(
            f"--steps {options.steps}: the run has {max(known):,} steps. Give a range"
            " within these that includes a logged or saved step."
        )
    return (_find if options.find else _compare)(replay, first, last, options)


def parse(
    parser: argparse.ArgumentParser, words: Sequence[str], kind: type[_Options]
) -> tuple[Path, _Options]:
    """Parses a command line; returns the run's directory and the other options."""
    parser.add_argument("run", metavar="RUN", help="directory of the run")
    flags.add_flags(parser, kind)
    given = flags.parse(parser, words)
    run = layout.locate_run(given.pop("run"))
    if is_locked(run):
        raise UsageError(f"{run} is still being trained. Wait until training ends.")
    return run, kind(**given)


def open_run(run: Path, options: ReplayOptions) -> "Replay":
    """Assembles a run's training again; prints which package versions have changed."""
    restoring.check_usable(str(run), None, options.trust_model)
    settings = run_config.read_run_config(run)
    entry_point.import_tensorflow(deterministic=settings.get("deterministic", False))
    from cifar10.training.replay import Replay

    replay = Replay(run, options.num_gpus, options.data_dir)
    if note := starting.version_note(settings, replay.training.settings):
        say(note)
    return replay


def _compare(replay: "Replay", first: int, last: int, options: Options) -> int:
    """Recomputes steps and compares them with the run until one differs."""
    write = functools.partial(_write_sheet, options.images, replay)
    found = [*replay.compare(first, last, write)]
    differs = found[-1].largest > found[-1].bound
    worst = found[-1] if differs else max(found, key=lambda one: one.largest)
    verdict = "The run differs." if differs else "The run is the same."
    print(
        f"Steps {first:,} to {replay.step:,}: the largest relative difference is "
        f"{worst.largest:.2g}, of {worst.name} in the {worst.place} of step "
        f"{worst.step:,}. Rounding explains up to {worst.bound:g}.\n{verdict}"
    )
    return 1 if differs else 0


def _find(replay: "Replay", first: int, last: int, options: Options) -> int:
    """Finds the first step whose gradient jumps, and the images that cause it."""
    found = replay.find_jump(first, last)
    if found is None:
        print(f"Steps {first:,} to {last:,}: the gradient never jumps.")
        return 1
    norm, batches = found
    _write_sheet(options.images, replay, batches)
    step, losses = replay.step + 1, [loss for *_, loss in replay.describe(batches)]
    if not any(map(math.isfinite, losses)):
        print(
            f"Step {step:,}: the cross entropy of all {len(losses)} images is NaN or "
            "infinite, so no image caused this: the variables are too large. Train "
            "with a lower --learning_rate, or with --clip_norm."
        )
        return 1
    print(f"Step {step:,}: the gradient's norm is {norm:.3g}, most of it from:")
    for name, of_image, loss in replay.heaviest(batches, _MOST):
        print(f"  {name}: norm {of_image:.3g}, cross entropy {loss:.3g}")
    return 0


def _write_sheet(folder: str | None, replay: "Replay", batches: Any) -> None:
    """Writes a PNG and a CSV of the images of `batches`, sorted by decreasing loss."""
    if folder is None:
        return
    import numpy as np

    from cifar10.tools.picture_grid import draw_grid

    pictures = np.concatenate([images for images, _ in batches]).astype(np.float32)
    pictures -= pictures.min(axis=(1, 2, 3), keepdims=True)
    pictures *= 255 / np.maximum(pictures.max(axis=(1, 2, 3), keepdims=True), 1e-6)
    shown = zip(replay.describe(batches), np.nan_to_num(pictures), strict=True)
    ranked = sorted(shown, key=lambda one: -np.nan_to_num(one[0][2], nan=np.inf))
    cells = [
        (f"{name[-_LETTERS:]}: {loss:.3g}", picture.astype(np.uint8).squeeze())
        for (name, _, loss), picture in ranked
    ]
    step, table = replay.step + 1, io.StringIO()
    lines = [("image", "class", "cross entropy"), *(row for row, _ in ranked)]
    csv.writer(table, lineterminator="\n").writerows(lines)
    path = Path(folder, f"step-{step:08d}.png")
    with contextlib.suppress(OSError):  # `write_output` reports why.
        path.parent.mkdir(parents=True, exist_ok=True)
    drawn = draw_grid(f"Step {step:,}, largest loss first", cells, _COLUMNS)
    files.write_output(path, "--images", drawn)
    written = table.getvalue().encode(errors="surrogateescape")
    files.write_output(path.with_suffix(".csv"), "--images", written)
