"""Draws some pictures of each class, with its name, as one PNG."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

from cifar10.input.datasets import Images
from cifar10.tools import outputs

# So that a sheet of any data set is at most 700 x 9,000 pixels.
MOST_CLASSES = 100
_EACH = 10  # Pictures of a class.
_SIDE = 64  # Of a picture on the sheet.
_GAP = 4
_LINE = 20  # Of text.

# What distinguishes a sheet from other pictures.
_MARK = "A contact sheet of python -m cifar10 data"
_FLAG = "--contact_sheet"


def check_output(path: Path) -> None:
    """Refuses to overwrite anything but a contact sheet, before any work is done."""
    outputs.check(path, _FLAG, "contact sheet", _MARK)


def packed(
    title: str, images: Images, labels: np.ndarray, names: Sequence[str]
) -> bytes:
    """Returns the file of a sheet."""
    marked = PngImagePlugin.PngInfo()
    marked.add_text("Description", _MARK)
    content = io.BytesIO()
    draw(title, images, labels, names).save(content, "PNG", pnginfo=marked)
    return content.getvalue()


def write(path: Path, content: bytes) -> None:
    """Writes a sheet; an earlier one is replaced once the new one is complete."""
    outputs.write(path, _FLAG, content)


def draw(
    title: str, images: Images, labels: np.ndarray, names: Sequence[str]
) -> Image.Image:
    """Draws a row of pictures for each class, or for some if there are many."""
    shown = _some(np.arange(len(names)), MOST_CLASSES)
    if len(shown) < len(names):
        title = f"{len(shown)} of {len(names):,} classes: {title}"
    row = _LINE + _SIDE + 2 * _GAP
    width = _GAP + _EACH * (_SIDE + _GAP)
    sheet = Image.new("RGB", (width, _LINE + len(shown) * row + _GAP), "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(13)

    def say(text: str, top: int) -> None:
        room = width - 2 * _GAP
        if pen.textlength(text, font) > room:
            while text and pen.textlength(f"{text}...", font) > room:
                text = text[:-1]
            text += "..."
        pen.text((_GAP, top + 2), text, "black", font)

    say(title, 0)
    for number, label in enumerate(shown.tolist()):
        top = _LINE + number * row
        places = np.flatnonzero(labels == label)
        say(f"{names[label]}: {len(places):,}", top)
        for column, image in enumerate(images[_some(places, _EACH)]):
            corner = (_GAP + column * (_SIDE + _GAP), top + _LINE)
            sheet.paste(_thumbnail(image), corner)
    return sheet


def _some(values: np.ndarray, most: int) -> np.ndarray:
    """Returns up to so many of the values, evenly spread over all of them."""
    if len(values) <= most:
        return values
    return values[np.arange(most) * len(values) // most]


def _thumbnail(image: np.ndarray) -> Image.Image:
    height, width = image.shape[:2]
    scale = _SIDE / max(height, width)
    size = max(1, round(scale * width)), max(1, round(scale * height))
    # What is enlarged shows its pixels.
    how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BICUBIC
    return Image.fromarray(image).resize(size, how)
