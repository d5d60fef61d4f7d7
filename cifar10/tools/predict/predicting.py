"""Says what is on images, by the newest checkpoint of a run or by each as it comes."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import time
from pathlib import Path

import numpy as np

from cifar10.errors import UsageError
from cifar10.follower import Follower
from cifar10.input import records
from cifar10.tools.predict import pictures, top_k as likeliest
from cifar10.towers import devices

# Images at a time; it changes memory, not the result.
_BATCH = 256

_INCOMPLETE = 1


@dataclasses.dataclass(frozen=True)
class Options:
    """What to predict and how; the flags of `python -m cifar10 predict`.

    Attributes:
        images: Files, folders, or `-` for a list on standard input.
        train_dir: Directory of the run.
        follow: Whether to predict again at each new checkpoint, until the training has
            finished.
        interval_secs: Seconds between two looks for a new checkpoint.
        top_k: How many classes to name.
        use_averages: Whether to use the variables' moving averages.
        device: `auto`, `cpu`, `gpu` or `gpu:NUMBER`.
        as_json: Whether to print one JSON object per image instead of text.
    """

    images: list[str]
    train_dir: str
    follow: bool = False
    interval_secs: float = 5.0
    top_k: int = 3
    use_averages: bool = True
    device: str = "auto"
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise UsageError(f"--top_k {self.top_k}: it is at least 1.")
        if not 0 < self.interval_secs <= 86_400:
            raise UsageError(
                f"--interval_secs {self.interval_secs:g}: it is more than 0 and at "
                "most 86400."
            )


def run(options: Options) -> int:
    """Predicts as `options` say.

    Returns:
        The exit code: 1 if a file was no image that could be read.

    Raises:
        UsageError: There is nothing to predict from, or nothing to predict.
    """
    for stream in (sys.stdin, sys.stdout):  # Names of files need not be text.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")
    paths = pictures.find(options.images, sys.stdin or ())
    device = devices.place_evaluation(options.device)
    follower = Follower(options.train_dir, device, use_averages=options.use_averages)
    with follower:
        follower.look()
        if follower.weights_step is None and not options.follow:
            raise UsageError(follower.why_no_weights())
        read, images = _read(paths)
        if read:
            _predict_each(follower, read, images, options)
    return 0 if len(read) == len(paths) else _INCOMPLETE


def _read(paths: list[Path]) -> tuple[list[Path], np.ndarray]:
    """Reads the images that can be read, and names the others on stderr."""
    read, images = [], []
    for path in paths:
        try:
            images.append(pictures.read(path, records.HEIGHT, records.WIDTH))
        except pictures.PictureError as error:
            print(f"Skipped: {error}", file=sys.stderr, flush=True)
        else:
            read.append(path)
    return read, np.array(images)


def _predict_each(
    follower: Follower, paths: list[Path], images: np.ndarray, options: Options
) -> None:
    """Predicts by the newest weights and, if asked to, by all that follow."""
    told: set[str] = set()
    swaps = 0
    while True:
        for why in follower.refusals:
            _tell(f"PASSING OVER what cannot be used: {why}", told)
        if follower.swaps != swaps:
            swaps = follower.swaps
            _predict(follower, paths, images, options)
        if not options.follow:
            return
        step = follower.weights_step
        if follower.has_finished:
            _tell(f"The training has finished at step {step}.", told)
            return
        waiting = (
            follower.why_no_weights()
            if step is None
            else f"Waiting for a checkpoint after step {step} in {follower.directory}."
        )
        _tell(f"{waiting} Looking every {options.interval_secs:g} s.", told)
        time.sleep(options.interval_secs)
        follower.look()


def _predict(
    follower: Follower, paths: list[Path], images: np.ndarray, options: Options
) -> None:
    """Prints what the weights say of each image."""
    for first in range(0, len(paths), _BATCH):
        part = slice(first, first + _BATCH)
        step, logits, class_names = follower.predict(images[part])
        likeliest.check(options.top_k, len(class_names))
        if not options.as_json and first == 0:
            print(f"step {step}:", flush=True)
        named = likeliest.top_k(logits, class_names, options.top_k)
        for path, classes in zip(paths[part], named, strict=True):
            print(_line(path, step, classes, as_json=options.as_json), flush=True)


def _line(
    path: Path, step: int, classes: list[tuple[str, float]], *, as_json: bool
) -> str:
    if as_json:
        predictions = likeliest.as_json(classes)
        return json.dumps({"image": str(path), "step": step, **predictions})
    shown = ", ".join(f"{name} {100 * part:.1f} %" for name, part in classes)
    return f"{path}: {shown}"


def _tell(sentence: str, told: set[str]) -> None:
    """Says something on stderr, where no result goes, and nothing twice."""
    if sentence not in told:
        print(sentence, file=sys.stderr, flush=True)
    told.add(sentence)
