"""`python -m cifar10 replay`: recomputes steps of a run, and compares them with it."""

import argparse
import csv
import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cifar10.config import flags, layout, run_config
from cifar10.config.options import Checked, Count, Form
from cifar10.errors import UsageError, say
from cifar10.process import entry_point, files
from cifar10.run_directory import restoring

if TYPE_CHECKING:
    from cifar10.training.replay import Difference, Replay

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
_COLUMNS, _SIDE, _LINE = 8, 96, 14  # Of a sheet: pictures, pixels, a line of text.


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
    parser.add_argument("run", metavar="RUN", help="directory of the run")
    flags.add_flags(parser, Options)
    given = flags.parse(parser, words)
    run = layout.locate_run(given.pop("run"))
    options = Options(**given)
    first, last = map(int, options.steps.split(":"))
    replay = start_replay(run, options)
    most = replay.recorded["max_steps"] if options.find else replay.reached
    if not first <= last <= most:
        raise UsageError(
            f"--steps {options.steps}: the run has {most:,} steps. Give two of them, "
            "the earlier first."
        )
    replay.go_before(first)
    say(f"From step {replay.step:,} on, on {replay.training.placement.description}")
    return (_find if options.find else _compare)(replay, first, last, options)


def start_replay(run: Path, options: ReplayOptions) -> "Replay":
    """Assembles the training of a run; says if its code was another."""
    restoring.check_usable(str(run), None, options.trust_model)
    settings = run_config.read_run_config(run)
    entry_point.import_tensorflow(deterministic=settings.get("deterministic", False))
    from cifar10.training.replay import Replay

    replay = Replay(run, options.num_gpus, options.data_dir)
    if replay.version_note:
        say(replay.version_note)
    return replay


def _compare(replay: "Replay", first: int, last: int, options: Options) -> int:
    """Compares steps with the run until one differs."""

    def write(batches: Any) -> None:
        if options.images and replay.step + 1 >= first:
            _write_sheet(Path(options.images), replay, batches)

    largest, count = 0.0, 0
    for found in replay.compare(first, last, write):
        largest, count = max(largest, found.largest), count + 1
        if options.json:
            print(json.dumps(as_json(found)), flush=True)
        elif found.largest > replay.bound:
            print(
                f"Step {found.step:,} differs from the run's {found.place}: "
                f"{found.name} by {found.largest:.2g} of its size; rounding explains "
                f"{replay.bound:g} at most."
            )
        if found.largest > replay.bound:
            return 1
    if not options.json:
        print(
            f"Steps {first:,} to {last:,} are the run's: {count} comparisons with its "
            f"log and its checkpoints, largest difference {largest:.2g}"
            f"{'' if largest else ' (to the last bit)'}."
        )
    return 0


def as_json(found: "Difference") -> dict[str, Any]:
    """Returns a difference as values of JSON, which has no infinity."""
    largest = found.largest if math.isfinite(found.largest) else None
    return {**found._asdict(), "largest": largest}


def _find(replay: "Replay", first: int, last: int, options: Options) -> int:
    """Finds the first step whose gradient jumps, and the images that make it."""
    found = replay.find_jump(first, last)
    if found is None:
        print(f"No gradient from step {first:,} to {last:,} jumps.")
        return 1
    norm, batches = found
    heaviest, computed = replay.heaviest(batches, _MOST)
    names, losses = replay.image_names(), replay.losses(batches)
    if options.images:
        _write_sheet(Path(options.images), replay, batches)
    images = [
        {"image": names[at], "norm": of_image, "loss": float(losses[at])}
        for at, of_image in heaviest.items()
    ]
    result = {"step": replay.step + 1, "gradient_norm": norm, "images": images}
    print(json.dumps(result) if options.json else _text(result, computed))
    return 0


def _text(found: Mapping[str, Any], computed: int) -> str:
    lines = [
        f"Step {found['step']:,}: the gradient's norm is {found['gradient_norm']:.3g}.",
        f"By {computed} gradients of parts of the batch, the largest are of:",
    ]
    for one in found["images"]:
        norm, loss = f"norm {one['norm']:.3g}", f"cross entropy {one['loss']:.3g}"
        lines.append(f"  {one['image']}: {norm}, {loss}")
    return "\n".join(lines)


def _write_sheet(folder: Path, replay: "Replay", batches: Any) -> None:
    """Writes the next step's distorted images, the worst first, and their table."""
    import numpy as np
    from PIL import Image, ImageDraw

    names, losses = replay.image_names(), replay.losses(batches)
    images, labels = map(np.concatenate, zip(*batches, strict=True))
    order = np.argsort(-np.nan_to_num(losses, nan=np.inf), kind="stable").tolist()
    row = _SIDE + 2 * _LINE
    size = (_COLUMNS * _SIDE, math.ceil(len(order) / _COLUMNS) * row)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for place, at in enumerate(order):
        left, top = place % _COLUMNS * _SIDE, place // _COLUMNS * row
        shown = images[at] - images[at].min()
        shown = (shown / max(shown.max(), 1e-6) * 255).astype(np.uint8).squeeze()
        picture = Image.fromarray(shown).resize((_SIDE - 4, _SIDE - 4), 0)
        sheet.paste(picture, (left, top))
        text = f"{names[at][-15:]}\n{losses[at]:.3g}"
        pen.multiline_text((left, top + _SIDE - 4), text, "black")
    content, table = io.BytesIO(), io.StringIO()
    sheet.save(content, "PNG")
    rows = ([names[at], labels[at].tolist(), losses[at]] for at in order)
    csv.writer(table).writerows([["image", "label", "cross entropy"], *rows])
    name = f"step-{replay.step + 1:08d}"
    files.write_output(folder / f"{name}.png", "--images", content.getvalue())
    files.write_output(folder / f"{name}.csv", "--images", table.getvalue().encode())
