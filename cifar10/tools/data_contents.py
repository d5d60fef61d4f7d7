"""Describes a data set for the command `data`, and draws a contact sheet."""

import contextlib
import functools
import hashlib
import io
import math
import sysconfig
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps
from PIL.PngImagePlugin import PngInfo

from cifar10.input.corrections import names_of
from cifar10.input.dataset_base import Dataset, Images
from cifar10.input.records import Split
from cifar10.tools.near_duplicates import difference_hash, find_pairs

# Images and labels of each split, the training split first.
Parts: TypeAlias = Mapping[Split, tuple[Images, np.ndarray]]

_READ_BYTES = 2**26  # Images are read in pieces, since all may not fit in memory.

# At this ratio the smaller of two classes has a fifth of the images, which Google's
# guide calls imbalanced (developers.google.com/machine-learning/crash-course).
_UNEVEN = 4

# Text in the PNG file that distinguishes a contact sheet from other pictures.
SHEET_MARK = "A contact sheet of python -m cifar10 data"

# Limits a contact sheet to 700 x 9,000 pixels.
_MOST_CLASSES = 100
_EACH = 10  # Pictures of a class.
_SIDE = 64  # Pixels of a picture's longer side.
_GAP = 4
_LINE = 20  # Height of a line of text.
_TEXT = 13  # Height of a letter.
_FONT = "DejaVuSans.ttf"  # Pillow's default font has only English letters.
_WIDTH = _GAP + _EACH * (_SIDE + _GAP)


def draw_sheet(
    title: str, names: Sequence[str], images: Images, labels: np.ndarray
) -> bytes:
    """Returns a PNG with a row of pictures for each class, up to 100 classes."""
    shown = _spread(np.arange(len(names)), _MOST_CLASSES)
    if len(shown) < len(names):
        title = f"{len(shown)} of {len(names):,} classes: {title}"
    cells: list[tuple] = []
    for label in shown.tolist():
        places = np.flatnonzero(labels == label)
        texts, pictures = [f"{names[label]}: {len(places):,}"], _spread(places, _EACH)
        cells += zip_longest(texts, images[pictures], range(_EACH))
    return draw_grid(title, [cell[:2] for cell in cells], _EACH)


def draw_grid(title: str, cells: Sequence[tuple], columns: int) -> bytes:
    """Returns a PNG of a grid of cells, `columns` in a row.

    A cell is a text and a picture below it, uint8 [height, width, 3]. Either may be
    None.
    """
    row = _LINE + _SIDE + 2 * _GAP
    height = _LINE + math.ceil(len(cells) / columns) * row + _GAP
    sheet = Image.new("RGB", (_WIDTH, height), "white")
    pen = ImageDraw.Draw(sheet)
    _write(pen, (_GAP, 2), title)
    for place, (text, picture) in enumerate(cells):
        left = _GAP + place % columns * (_WIDTH // columns)
        top = _LINE + place // columns * row
        _write(pen, (left, top + 2), text or "")
        if picture is not None:
            # Small images are enlarged without interpolation: their pixels show.
            is_small = max(picture.shape) < _SIDE
            how = Image.Resampling.NEAREST if is_small else Image.Resampling.BICUBIC
            shown = ImageOps.contain(Image.fromarray(picture), (_SIDE, _SIDE), how)
            sheet.paste(shown, (left, top + _LINE))
    content, marked = io.BytesIO(), PngInfo()
    marked.add_text("Description", SHEET_MARK)
    sheet.save(content, "PNG", pnginfo=marked)
    return content.getvalue()


def _write(pen: ImageDraw.ImageDraw, corner: tuple[int, int], text: str) -> None:
    """Draws a line of text, without accents if no installed font has them."""
    font = _find_font()
    if font is None:
        apart = unicodedata.normalize("NFKD", text)
        plain = "".join(each for each in apart if not unicodedata.combining(each))
        text = plain.encode("ascii", "replace").decode()
    pen.text(corner, text, "black", font or ImageFont.load_default(_TEXT))


@functools.cache
def _find_font() -> ImageFont.FreeTypeFont | None:
    """Returns `_FONT` from Matplotlib or from the system; None if neither has it."""
    packages = sysconfig.get_path("purelib")
    for place in (Path(packages, "matplotlib/mpl-data/fonts/ttf", _FONT), _FONT):
        with contextlib.suppress(OSError):
            return ImageFont.truetype(place, _TEXT)
    return None


def _spread(values: np.ndarray, most: int) -> np.ndarray:
    """Returns at most `most` of the values, evenly spread over all of them."""
    if len(values) <= most:
        return values
    return values[np.arange(most) * len(values) // most]


def look_at(dataset: Dataset, parts: Parts) -> dict[str, Any]:
    """Returns all that `cifar10 data` prints about a data set, as JSON values."""
    counts = [
        np.bincount(labels, minlength=dataset.classes).tolist()
        for _, labels in parts.values()
    ]
    names = [
        name
        for part, (_, labels) in parts.items()
        for name in names_of(dataset, part, len(labels))
    ]
    return {
        "data": dataset.name,
        "data_dir": str(dataset.directory),
        "image_shape": list(dataset.image_shape),
        "fingerprint": dataset.fingerprint,
        "classes": [
            {"name": name, **dict(zip(parts, of_class, strict=True))}
            for name, *of_class in zip(dataset.class_names, *counts, strict=True)
        ],
        "left_out": dataset.left_out,
        "notes": [*dataset.notes, *_notes_on_balance(counts[0])],
        "duplicates": find_duplicates(parts, names),
    }


def find_duplicates(parts: Parts, names: Sequence[str]) -> dict[str, Any]:
    """Finds prepared pictures that are equal pixel for pixel, or nearly equal.

    Args:
        parts: Images and labels of each split, the training split first.
        names: The names of all pictures, in the order of the splits.

    Returns:
        `groups`: the names of the pictures in each group of equal pictures.
        `repeated`: the number of pictures that equal an earlier picture.
        `in_both_parts`: the number of held-out pictures that equal a training picture.
        `in_several_classes`: the number of groups whose pictures have different labels.
        `nearly`: pairs of a training picture and a nearly equal held-out picture.
    """
    labels = np.concatenate([labels for _, labels in parts.values()])
    trained = len(parts["train"][1])
    images = [images for images, _ in parts.values()]
    of_parts, looks = zip(*map(_hashes, images), strict=True)
    digests = [digest for of_part in of_parts for digest in of_part]
    nearly, first = [], trained
    for some, of_some in zip(images[1:], looks[1:], strict=True):
        for one, other in find_pairs(images[0], some, looks[0], of_some):
            if digests[one] != digests[first + other]:
                nearly.append([names[one], names[first + other]])
        first += len(some)
    by_digest = defaultdict(list)
    for place, digest in enumerate(digests):
        by_digest[digest].append(place)
    groups = [group for group in by_digest.values() if len(group) > 1]
    return {
        "groups": [[names[place] for place in group] for group in groups],
        "repeated": sum(len(group) - 1 for group in groups),
        "in_both_parts": sum(
            place >= trained
            for group in groups
            if group[0] < trained
            for place in group
        ),
        "in_several_classes": sum(
            len(np.unique(labels[group])) > 1 for group in groups
        ),
        "nearly": nearly,
    }


def _hashes(images: Images) -> tuple[list[bytes], np.ndarray]:
    """Returns the digests (bytes) and perceptual hashes (uint64) of images' pixels."""
    step = max(1, _READ_BYTES * len(images) // max(1, images.nbytes))
    digests, looks = [], []
    for start in range(0, len(images), step):
        for image in np.ascontiguousarray(images[start : start + step]):
            digests.append(hashlib.blake2b(image, digest_size=16).digest())
            looks.append(difference_hash(image))
    return digests, np.array(looks, np.uint64)


def _notes_on_balance(trained: Sequence[int]) -> Iterator[str]:
    most, fewest = max(trained), min(trained)
    if fewest and most >= _UNEVEN * fewest:
        yield f"the largest class is {most / fewest:.1f} times as large as the smallest"
        yield 'class_weights = "balanced" in a recipe gives all classes equal weight'
