"""Draws `augmentations.png`: one batch of CIFAR-10 with each augmentation.

    python docs/images/draw_augmentations.py

It needs the real CIFAR-10, in $CIFAR10_DATA_DIR or ~/.cache/cifar10.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw, ImageFont

from cifar10.config.augmentation import PARTS
from cifar10.input import datasets, pipeline
from cifar10.input.augmentation import Augmentation
from cifar10.input.distortions import channel_statistics

OUTPUT = Path(__file__).with_name("augmentations.png")

# Rows, and what a recipe says to get them. Everything is changed, to show it.
ROWS = {
    "flip_translate alone": {},
    **{
        name: {name: {"probability": 1.0} if "probability" in values else {}}
        for name, values in PARTS.items()
    },
}
ROWS["mixup"]["mixup"]["alpha"] = 1.0
SHOWN = 8
SIDE = 96  # Three times as large as the images.
GAP, LINE = 4, 18
LEAST_PART = 0.005  # Of a class, to be named.
COLOURS = 128


def batch(dataset: datasets.Dataset, augmentation: dict) -> tuple[np.ndarray, ...]:
    """Returns the first images of a run, uint8, and the parts of their classes."""
    images, labels = dataset.read("train")
    batches = pipeline.training_batches(
        images,
        labels,
        pipeline.BatchMaker(
            "flip_translate",
            seed=5,
            augmentation=Augmentation(augmentation, dataset.classes),
        ),
        batch_size=SHOWN,
        towers=1,
        start_step=0,
    )
    ((scaled, parts),) = next(batches.as_numpy_iterator())
    means, deviations = channel_statistics(scaled.shape[-1])
    pixels = (scaled * deviations + means) * 255.0
    if parts.ndim == 1:
        parts = tf.one_hot(parts, dataset.classes).numpy()
    return np.clip(np.round(pixels), 0, 255).astype(np.uint8), parts


def described(parts: np.ndarray, names: tuple[str, ...]) -> list[str]:
    """Returns a line for each class of an image."""
    several = [place for place in np.argsort(-parts) if parts[place] > LEAST_PART]
    if len(several) == 1:
        return [names[several[0]]]
    return [f"{names[place]} {parts[place]:.0%}" for place in several]


def draw() -> None:
    """Writes the picture; with one version of Pillow it is always the same."""
    dataset = datasets.find("cifar10")
    row = LINE + SIDE + 2 * LINE + 2 * GAP
    width = GAP + SHOWN * (SIDE + GAP)
    sheet = Image.new("RGB", (width, len(ROWS) * row + GAP), "white")
    pen = ImageDraw.Draw(sheet)
    title, small = ImageFont.load_default(14), ImageFont.load_default(12)
    for number, (name, augmentation) in enumerate(ROWS.items()):
        top = GAP + number * row
        pen.text((GAP, top), name, "black", title)
        images, labels = batch(dataset, augmentation)
        for column, (image, parts) in enumerate(zip(images, labels, strict=True)):
            left = GAP + column * (SIDE + GAP)
            large = Image.fromarray(image).resize(
                (SIDE, SIDE), Image.Resampling.NEAREST
            )
            sheet.paste(large, (left, top + LINE))
            for line, text in enumerate(described(parts, dataset.class_names)):
                place = left, top + LINE + SIDE + line * (LINE - 3)
                pen.text(place, text, "black", small)
    sheet.quantize(COLOURS).save(OUTPUT, optimize=True)


if __name__ == "__main__":
    draw()
