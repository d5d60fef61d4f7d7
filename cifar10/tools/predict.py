"""`python -m cifar10 predict`: classifies files of images."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cifar10 import files
from cifar10.config import flags, layout, run_options
from cifar10.config.options import Count
from cifar10.errors import UsageError, say
from cifar10.process import entry_point
from cifar10.run_directory import restoring

if TYPE_CHECKING:
    from cifar10.follower import Follower
    from cifar10.tools.classification import Decoder

HELP = "classify images"
DESCRIPTION = """Names the likeliest classes of images, with their probabilities.

    python -m cifar10 predict holiday --train_dir runs/cifar10_train
    python -m cifar10 predict cat.png --explain maps

Reads PNG, JPEG, WebP, BMP and GIF files of up to 50 megapixels and 50 MB, those of
a folder by their extensions, and prepares them as evaluation does. With --follow
it predicts again with each new checkpoint. Exit code 0: all were classified; 1:
images named on stderr were skipped; 2: a mistake that you can fix.
"""

_BATCH = 256  # Images in memory at a time; other numbers have the same result.
# The largest images take a fifth of this time; see `Decoder`.
_DECODING_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Options(run_options.RunOptions):
    """What to classify and how.

    Attributes:
        images: image files, or folders of them
        follow: predict again at each new checkpoint
        interval_secs: seconds between checks for a new checkpoint
        top_k: number of classes to name
        use_averages: use the variables' moving averages, not their last values
        device: device to use: auto, cpu or gpu
        explain: folder for NUMBER-NAME.heat-map.png of each image: a heat map over it
            (HiResCAM) of the pixels that support the likeliest class (default: none)
        json: print JSON, one object per image
    """

    images: Sequence[str]
    _: dataclasses.KW_ONLY
    follow: bool = False
    interval_secs: run_options.Seconds = 5.0
    top_k: Count = 3
    use_averages: bool = True
    device: run_options.Device = "auto"
    explain: str | None = None
    json: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in self.images:  # It would be the current folder.
            raise UsageError("IMAGE: the value is empty. Name an image or a folder.")
        if self.follow and self.step is not None:
            raise UsageError("--follow and --step cannot be combined. Leave out one.")
        if self.interval_secs != Options.interval_secs and not self.follow:
            raise UsageError(f"--interval_secs {self.interval_secs:g} needs --follow.")


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    what = "image file or folder"
    parser.add_argument("images", nargs="+", metavar="IMAGE", help=what)
    flags.add_flags(parser, Options)
    if not (options := Options(**flags.parse(parser, words))).follow:
        restoring.check_usable(options.train_dir, options.trust_model, options.step)
    entry_point.import_tensorflow()
    return predict_files(options)


def predict_files(options: Options) -> int:
    """Classifies images; returns the exit code, 1 if a file cannot be read."""
    from cifar10.follower import Follower
    from cifar10.input import synthetic
    from cifar10.input.pictures import decoding
    from cifar10.input.pictures.listing import list_pictures
    from cifar10.tools.classification import Decoder
    from cifar10.towers import devices

    names = map(Path, options.images)
    paths = [*dict.fromkeys(path for name in names for path in list_pictures(name))]
    maps = _places_of_maps(paths, options.explain) if options.explain else {}
    decoder = Decoder(_DECODING_SECONDS, decoding.MAX_PIXELS)
    read = 0
    with Follower(
        options.train_dir,
        devices.place_evaluation(options.device),
        step=options.step,
        use_averages=options.use_averages,
        trust_model=options.trust_model,
    ) as follower:
        for step in follower.follow(options.interval_secs, once=not options.follow):
            if follower.names["class_names"] == synthetic.CLASS_NAMES:
                follower.say_news("Trained on SYNTHETIC figures, not on photographs.")
            if not options.json:
                print(f"step {step}:", flush=True)
            read = 0
            for first in range(0, len(paths), _BATCH):
                batch = paths[first : first + _BATCH]
                read += _predict(follower, decoder, batch, options, maps)
    return 0 if read == len(paths) else 1


def _places_of_maps(paths: Sequence[Path], explain: str) -> dict[Path, Path]:
    folder = layout.absolute_path(explain)
    layout.refuse_own_folder(folder, "--explain")
    with files.writing(folder, "--explain"):
        folder.mkdir(parents=True, exist_ok=True)
    # File systems allow 255 bytes, and four of UTF-8 for a character.
    numbered = enumerate(paths, 1)
    return {path: folder / f"{n}-{path.stem[:50]}.heat-map.png" for n, path in numbered}


def _predict(
    follower: "Follower",
    decoder: "Decoder",
    paths: Sequence[Path],
    options: Options,
    maps: Mapping[Path, Path],
) -> int:
    """Prints the classes of images, draws `maps`; returns how many images it read."""
    import numpy as np

    from cifar10.input.pictures import decoding
    from cifar10.tools.classification import likeliest_classes

    read, shape = {}, follower.image_shape
    for path in paths:
        try:
            read[path] = decoder.decode(decoding.read(path), str(path), shape)
        except decoding.PictureError as error:
            say(f"Skipped: {error}")
    if not read:
        return 0
    images = np.stack([*read.values()])
    step, logits, class_names = follower.predict(images)
    ranked = likeliest_classes(logits, class_names, options.top_k)
    if maps and follower.model:
        from cifar10.tools.heat_maps import draw, heat_maps

        if (heats := heat_maps(follower.model, images, logits.argmax(axis=1))) is None:
            why = "No convolution's output is larger than 1 x 1."
            raise UsageError(f"{why} Leave out --explain.")
        for path, image, heat in zip(read, images, heats, strict=True):
            files.write_output(maps[path], "--explain", draw(image, heat))
    for path, classes in zip(read, ranked, strict=True):
        content = {"image": str(path), "step": step, "predictions": classes}
        shares = (f"{one['class']} {100 * one['probability']:.1f} %" for one in classes)
        shown = ", ".join(shares)
        if maps:
            content["heat_map"] = str(maps[path])
            shown += f"; heat map: {maps[path]}"
        print(json.dumps(content) if options.json else f"{path}: {shown}", flush=True)
    return len(read)
