"""`python -m cifar10 replay`: recomputes steps of a run, and compares them with it."""

import argparse
import contextlib
import csv
import dataclasses
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cifar10.config import flags, layout, run_config
from cifar10.config.options import Checked, Count, Form
from cifar10.errors import UsageError, say
from cifar10.process import entry_point, files
from cifar10.run_directory import checkpoints, restoring, starting
from cifar10.run_directory.lock import is_locked

if TYPE_CHECKING:
    from cifar10.training.replay import Replay

HELP = "recompute steps of a run, and find the images that broke it"
DESCRIPTION = """Recomputes steps of a run; compares them with log and checkpoints.

    python -m cifar10 replay runs/cifar10_train --steps 1001:1100
    python -m cifar10 replay runs/cifar10_train --steps 1001:1100 --find

Begins at the checkpoint before the first step, on any number of towers, and
writes nothing to the run. A --deterministic run is the same to the last bit on
the same kind of machine; otherwise rounding differs, within a bound. --find
names the step whose gradient is not finite or jumps, and the images that make
it. Exit code 1: something differs, or --find found nothing.
"""

_MOST = 4  # Images that --find names.
_COLUMNS, _WIDTH, _SIDE, _TEXT = 8, 112, 64, 32  # Of a sheet; pixels of a picture.

_Options = TypeVar("_Options", bound="ReplayOptions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayOptions(Checked):
    """How to put the training of a run together again.

    Attributes:
        num_gpus: number of towers (default: the run's)
        data_dir: directory of the data set (default: the run's)
        trust_model: model to trust, as module:function, in a run not yours (default:
            none)
        json: print JSON
    """

    num_gpus: Count | None = None
    data_dir: str | None = None
    trust_model: str | None = None
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ReplayOptions):
    """What to recompute.

    Attributes:
        steps: FIRST:LAST, the steps to compare, as 1001:1100
        find: find the step whose gradient jumps, and the images that make it
        images: folder for a picture and a table of each step's images, with their
            names and losses (default: none)
    """

    steps: Annotated[
        str, Form(r"[1-9]\d{0,11}:[1-9]\d{0,11}", "FIRST:LAST, as 1001:1100")
    ]
    find: bool = False
    images: str | None = None


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    replay, options = open_run(parser, words, Options)
    first, last = map(int, options.steps.split(":"))
    if options.find:
        known = [first, replay.recorded["max_steps"]]
    else:
        known = [0, *replay.logged, *checkpoints.steps(replay.run / layout.CHECKPOINTS)]
    if last > max(known) or not any(first <= step <= last for step in known):
        raise UsageError(
            f"--steps {options.steps}: the run has {max(known):,} steps. Give two of "
            "them, the earlier first, and between them one that it has logged or saved."
        )
    replay.go_before(first)
    say(f"From step {replay.step:,} on, on {replay.training.placement.description}")
    return (_find if options.find else _compare)(replay, first, last, options)


def open_run(
    parser: argparse.ArgumentParser, words: Sequence[str], kind: type[_Options]
) -> tuple["Replay", _Options]:
    """Assembles the training of the run that is named; says if its code was another."""
    parser.add_argument("run", metavar="RUN", help="directory of the run")
    flags.add_flags(parser, kind)
    given = flags.parse(parser, words)
    run = layout.locate_run(given.pop("run"))
    options = kind(**given)
    restoring.check_usable(str(run), None, options.trust_model)
    if is_locked(run):
        raise UsageError(f"{run} is still being trained. Wait for its end, or copy it.")
    settings = run_config.read_run_config(run)
    entry_point.import_tensorflow(deterministic=settings.get("deterministic", False))
    from cifar10.training.replay import Replay

    replay = Replay(run, options.num_gpus, options.data_dir)
    if note := starting.version_note(settings, replay.training.settings):
        say(note)
    return replay, options


def _compare(replay: "Replay", first: int, last: int, options: Options) -> int:
    """Compares steps with the run until one differs."""

    def write(batches: Any) -> None:
        if options.images:
            _write_sheet(options.images, replay, batches)

    found, verdict = [], "These are the steps of the run."
    for one in replay.compare(first, last, write):
        found.append(one)
        if options.json:
            print(json.dumps(one._asdict()), flush=True)
        if one.largest > one.bound:
            verdict = "This is not what the run has."
            break
    worst = max(found, key=lambda one: (one.largest > one.bound, one.largest))
    if not options.json:
        print(
            f"Steps {first:,} to {replay.step:,}: the largest difference is "
            f"{worst.largest:.2g} of its size, of {worst.name} in the {worst.place} of "
            f"step {worst.step:,}; rounding explains {worst.bound:g}.\n{verdict}"
        )
    return 1 if worst.largest > worst.bound else 0


def _find(replay: "Replay", first: int, last: int, options: Options) -> int:
    """Finds the first step whose gradient jumps, and the images that make it."""
    found = replay.find_jump(first, last)
    if found is None:
        print(f"No gradient from step {first:,} to {last:,} jumps.")
        return 1
    norm, batches = found
    if options.images:
        _write_sheet(options.images, replay, batches)
    described, step = replay.describe(batches), replay.step + 1
    lines = [f"Step {step:,}: the gradient's norm is {norm:.3g}, most of it from:"]
    images = []
    for at, of_image in replay.heaviest(batches, _MOST).items():
        name, _, loss = described[at]
        lines.append(f"  {name}: norm {of_image:.3g}, cross entropy {loss:.3g}")
        numbers = {"norm": _finite(of_image), "loss": _finite(loss)}
        images.append({"image": name, **numbers})
    result = {"step": step, "gradient_norm": _finite(norm), "images": images}
    print(json.dumps(result) if options.json else "\n".join(lines))
    return 0


def _finite(number: float) -> float | None:
    """Returns a number as JSON has it, in which only finite ones exist."""
    return number if math.isfinite(number) else None


def _write_sheet(folder: str, replay: "Replay", batches: Any) -> None:
    """Writes the next step's distorted images, the worst first, and their table."""
    import numpy as np
    from PIL import Image, ImageDraw

    from cifar10.tools.data_contents import thumbnail

    pictures = np.concatenate([images for images, _ in batches]).astype(np.float32)
    described = replay.describe(batches)
    losses = [loss for *_, loss in described]
    order = np.argsort(np.nan_to_num(losses, nan=np.inf), kind="stable")[::-1].tolist()
    row = _SIDE + _TEXT
    size = (_COLUMNS * _WIDTH, math.ceil(len(order) / _COLUMNS) * row)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for place, at in enumerate(order):
        left, top = place % _COLUMNS * _WIDTH, place // _COLUMNS * row
        shown = np.nan_to_num(pictures[at] - pictures[at].min())
        shown *= 255 / max(shown.max(), 1e-6)
        sheet.paste(thumbnail(shown.astype(np.uint8).squeeze()), (left, top))
        text = f"{described[at][0][-18:]}\n{losses[at]:.3g}"
        pen.multiline_text((left, top + _SIDE), text, "black")
    content, table = io.BytesIO(), io.StringIO()
    sheet.save(content, "PNG")
    rows = [("image", "label", "cross entropy"), *(described[at] for at in order)]
    csv.writer(table, lineterminator="\n").writerows(rows)
    path = Path(folder, f"step-{replay.step + 1:08d}.png")
    with contextlib.suppress(OSError):  # The next line says why not.
        path.parent.mkdir(parents=True, exist_ok=True)
    files.write_output(path, "--images", content.getvalue())
    written = table.getvalue().encode(errors="surrogateescape")
    files.write_output(path.with_suffix(".csv"), "--images", written)
