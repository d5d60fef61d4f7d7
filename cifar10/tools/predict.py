"""`python -m cifar10 predict`: classifies files of images."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar10.config import flags, layout, run_options
from cifar10.config.options import Count
from cifar10.errors import UsageError, printable, reason, say
from cifar10.process import entry_point, files
from cifar10.run_directory import restoring

if TYPE_CHECKING:
    from cifar10.follower import Follower

HELP = "classify images"
DESCRIPTION = """Names the likeliest classes of images, with their probabilities.

    python -m cifar10 predict cat.png holiday/ --train_dir runs/cifar10_train
    python -m cifar10 predict cat.png --explain maps
    find . -name '*.jpg' | python -m cifar10 predict - --json

Reads PNG, JPEG, WebP, BMP and GIF files of up to 50 megapixels and 50 MB, and
prepares them as evaluation does. With --follow it predicts again with each new
checkpoint, until training has finished. Exit code 0: all were classified; 1:
those named on stderr were skipped; 2: a mistake that you can fix.
"""

# Images per batch. The batch size changes memory, not the result.
_BATCH = 256
# The largest images take a fifth of this time; see `Decoder`.
_DECODING_SECONDS = 5.0
_KNOWS_FIGURES = (
    "The model was trained on the SYNTHETIC stand-in: it recognizes ten figures, for\n"
    "example a disc or a cross, but no photographs."
)


@dataclasses.dataclass(frozen=True)
class Options(run_options.RunOptions):
    """What to classify and how.

    Attributes:
        images: files, folders, or `-` for a list on standard input
        follow: predict again at each new checkpoint
        interval_secs: seconds between checks for a new checkpoint
        top_k: number of classes to name (default: 3, or all if there are fewer)
        use_averages: use the variables' moving averages, not their last values
        device: device to use: auto, cpu or gpu
        explain: folder for a PNG of each image, overlaid with a heat map (HiResCAM) of
            the pixels that support the likeliest class (default: none)
        json: print JSON, one object per image
    """

    images: Sequence[str]
    _: dataclasses.KW_ONLY
    follow: bool = False
    interval_secs: run_options.Seconds = 5.0
    top_k: Count | None = None
    use_averages: bool = True
    device: run_options.Device = "auto"
    explain: str | None = None
    json: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.follow and self.step is not None:
            raise UsageError(
                f"--follow --step {self.step}: --follow predicts with each new "
                "checkpoint, --step with a single one. Leave out one of the flags."
            )


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    images = "image files, folders of images, or - for a list on standard input"
    parser.add_argument("images", nargs="+", metavar="IMAGE", help=images)
    flags.add_flags(parser, Options)
    options = Options(**flags.parse(parser, words))
    if not options.follow:
        restoring.check_usable(options.train_dir, options.step, options.trust_model)
    entry_point.import_tensorflow()
    return predict_files(options)


def predict_files(options: Options) -> int:
    """Classifies images; returns the exit code, 1 if a file cannot be read."""
    from cifar10.follower import Follower
    from cifar10.towers import devices

    paths = find_images(options.images, sys.stdin or ())
    places = _places_of_maps(paths, options.explain) if options.explain else {}
    device = devices.place_evaluation(options.device)
    read: list[Path] = []
    shape = None
    with Follower(
        options.train_dir,
        device,
        step=options.step,
        use_averages=options.use_averages,
        trust_model=options.trust_model,
    ) as follower:
        for _ in follower.follow(options.interval_secs, once=not options.follow):
            if follower.image_shape != shape:  # A new run may replace the followed one.
                shape = follower.image_shape
                read, images = _read(paths, shape)
            if not read:
                break
            _predict(follower, read, images, options, places, device)
    return 0 if len(read) == len(paths) else 1


def _places_of_maps(paths: Sequence[Path], explain: str) -> dict[Path, Path]:
    """Maps the path of each image to the path of its heat map."""
    from cifar10.tools.heat_maps import MARK

    folder = layout.absolute_path(explain)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.unwritable(folder, "--explain", error) from error
    numbered = enumerate(paths, 1)
    places = {path: folder / f"{number}-{path.stem}.png" for number, path in numbered}
    for place in places.values():
        files.check_replaceable(place, "--explain", "heat map", MARK)
    return places


def find_images(names: Sequence[str], lines: Iterable[str]) -> list[Path]:
    """Expands the names on a command line to the paths of files.

    Args:
        names: Files, folders and `-`. A folder stands for all regular files in and
            below it that are not hidden; `-` stands for the files in `lines`.
        lines: Names of files, one per line.

    Raises:
        UsageError: There are no files.
    """
    found: list[Path] = []
    for name in names:
        if name == "-":
            found += [Path(line) for line in map(str.strip, lines) if line]
        elif os.path.isdir(name):  # noqa: PTH112 - `Path.is_dir` raises.
            found += _in_folder(Path(name))
        else:
            found.append(Path(name))
    if not found:
        places = ", ".join("standard input" if name == "-" else name for name in names)
        raise UsageError(f"There are no files in {places}. Name an image.")
    return found


def _in_folder(folder: Path) -> list[Path]:
    paths = sorted(folder.rglob("*"))
    return [
        path
        for path in paths
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        # Keeps broken links, which are reported when they are read. The methods of
        # `Path` raise an error without permission to read the folder.
        and (os.path.isfile(path) or not os.path.exists(path))  # noqa: PTH110, PTH113
    ]


def _read(
    paths: list[Path], shape: tuple[int, int, int]
) -> tuple[list[Path], list[Any]]:
    """Reads the images that can be read, and names the others on stderr."""
    from cifar10.input.pictures import decoding
    from cifar10.tools.classification import Decoder

    read, images = [], []
    decoder = Decoder(_DECODING_SECONDS, decoding.MAX_PIXELS)
    for path in paths:
        try:
            images.append(decoder.decode(decoding.read(path), str(path), shape))
        except decoding.PictureError as error:
            say(f"Skipped: {printable(str(error))}")
        except OSError as error:
            why = f"No process can be started to decode images: {reason(error)}."
            raise UsageError(why) from error
        else:
            read.append(path)
    return read, images


def _predict(
    follower: "Follower",
    paths: list[Path],
    images: Any,
    options: Options,
    places: Mapping[Path, Path],
    device: str,
) -> None:
    """Prints the likeliest classes of each image, and draws heat maps if requested."""
    import numpy as np

    from cifar10.input import synthetic
    from cifar10.tools.classification import likeliest_classes

    for first in range(0, len(paths), _BATCH):
        part = slice(first, first + _BATCH)
        step, logits, class_names = follower.predict(images[part])
        named = likeliest_classes(logits, class_names, options.top_k)
        if places and follower.model:
            from cifar10.tools.heat_maps import draw, heat_maps

            best, some = logits.argmax(axis=1), np.stack(images[part])
            maps = heat_maps(follower.model, some, best, device)
            if maps is None:
                raise UsageError(
                    "--explain: the model has no convolution with an output larger "
                    "than 1 x 1, which a heat map needs. Leave out --explain."
                )
            for path, image, heat in zip(paths[part], some, maps, strict=True):
                files.write_output(places[path], "--explain", draw(image, heat))
        if first == 0 and class_names == synthetic.CLASS_NAMES:
            say(_KNOWS_FIGURES)
        if not options.json and first == 0:
            print(f"step {step}:", flush=True)
        for path, classes in zip(paths[part], named, strict=True):
            content = {"image": str(path), "step": step, "predictions": classes}
            shown = ", ".join(
                f"{each['class']} {100 * each['probability']:.1f} %" for each in classes
            )
            if places:
                content["heat_map"] = str(places[path])
                shown += f"; heat map: {places[path]}"
            line = json.dumps(content) if options.json else f"{path}: {shown}"
            # A name must not control a terminal, but other programs need it unchanged.
            print(printable(line) if sys.stdout.isatty() else line, flush=True)
