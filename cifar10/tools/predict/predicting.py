"""Predicts the classes of images with one checkpoint of a run, or each new one."""

import json
import sys
from pathlib import Path

import numpy as np

from cifar10.errors import UsageError, printable, reason, say
from cifar10.follower import Follower
from cifar10.input import synthetic
from cifar10.input.pictures import decoding
from cifar10.tools.predict import pictures, top_k as likeliest
from cifar10.tools.predict.decoder import Decoder
from cifar10.tools.predict.options import Options
from cifar10.towers import devices

# Images at a time; it changes memory, not the result.
_BATCH = 256
# The largest images take a fifth of it; see `Decoder`.
_DECODING_SECONDS = 5.0
_KNOWS_FIGURES = (
    "The model was trained on the SYNTHETIC stand-in: it knows ten figures, such as a\n"
    "disc or a cross, and nothing of photographs."
)


def run(options: Options) -> int:
    """Predicts; returns the exit code, 1 if a file could not be read as an image."""
    paths = pictures.find(options.images, sys.stdin or ())
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
            if follower.image_shape != shape:  # Another run may have taken its place.
                shape = follower.image_shape
                read, images = _read(paths, shape)
            if not read:
                break
            _predict(follower, read, images, options)
    return 0 if len(read) == len(paths) else 1


def _read(
    paths: list[Path], shape: tuple[int, int, int]
) -> tuple[list[Path], np.ndarray]:
    """Reads the images that can be read, and names the others on stderr."""
    read, images = [], []
    decoder = Decoder(_DECODING_SECONDS, decoding.MAX_PIXELS)
    for path in paths:
        try:
            content = {str(path): decoding.read(path)}
            images += [*decoder.decode(content, shape)]
        except decoding.PictureError as error:
            say(f"Skipped: {printable(str(error))}")
        except OSError as error:
            why = f"No process can be started to decode images: {reason(error)}."
            raise UsageError(why) from error
        else:
            read.append(path)
    return read, np.array(images)


def _predict(
    follower: Follower, paths: list[Path], images: np.ndarray, options: Options
) -> None:
    """Prints the likeliest classes of each image."""
    for first in range(0, len(paths), _BATCH):
        part = slice(first, first + _BATCH)
        step, logits, class_names = follower.predict(images[part])
        count = likeliest.checked(options.top_k, len(class_names))
        if first == 0 and class_names == synthetic.CLASS_NAMES:
            say(_KNOWS_FIGURES)
        if not options.json and first == 0:
            print(f"step {step}:", flush=True)
        named = likeliest.top_k(logits, class_names, count)
        for path, classes in zip(paths[part], named, strict=True):
            shown = ", ".join(
                f"{each['class']} {100 * each['probability']:.1f} %" for each in classes
            )
            # A name must not control a terminal; other programs want it unchanged.
            name = printable(str(path)) if sys.stdout.isatty() else path
            line = f"{name}: {shown}"
            if options.json:
                content = {"image": str(path), "step": step, "predictions": classes}
                line = json.dumps(content)
            print(line, flush=True)
