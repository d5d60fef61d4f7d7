"""Draws some pictures of each class, with its name, as one PNG."""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps
from PIL.PngImagePlugin import PngInfo

from cifar10.input.datasets import Images

# What distinguishes a sheet from other pictures.
MARK = "A contact sheet of python -m cifar10 data"

# So that a sheet of any data set is at most 700 x 9,000 pixels.
_MOST_CLASSES = 100
_EACH = 10  # Pictures of a class.
_SIDE = 64  # Of a picture on the sheet.
_GAP = 4
_LINE = 20  # Of text.
_WIDTH = _GAP + _EACH * (_SIDE + _GAP)


def draw_sheet(
    title: str, images: Images, labels: np.ndarray, names: Sequence[str]
) -> bytes:
    """Returns a PNG with a row for each class, or for some if there are many."""
    shown = _spread(np.arange(len(names)), _MOST_CLASSES)
    if len(shown) < len(names):
        title = f"{len(shown)} of {len(names):,} classes: {title}"
    row = _LINE + _SIDE + 2 * _GAP
    sheet = Image.new("RGB", (_WIDTH, _LINE + len(shown) * row + _GAP), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    pen.text((_GAP, 2), title, "black", font)
    for number, label in enumerate(shown.tolist()):
        top = _LINE + number * row
        places = np.flatnonzero(labels == label)
        pen.text((_GAP, top + 2), f"{names[label]}: {len(places):,}", "black", font)
        for column, image in enumerate(images[_spread(places, _EACH)]):
            corner = (_GAP + column * (_SIDE + _GAP), top + _LINE)
            sheet.paste(_thumbnail(image), corner)
    content, marked = io.BytesIO(), PngInfo()
    marked.add_text("Description", MARK)
    sheet.save(content, "PNG", pnginfo=marked)
    return content.getvalue()


def _spread(values: np.ndarray, most: int) -> np.ndarray:
    """Returns at most so many of the values, evenly spread over all of them."""
    if len(values) <= most:
        return values
    return values[np.arange(most) * len(values) // most]


def _thumbnail(image: np.ndarray) -> Image.Image:
    """Returns an image at the size of the sheet's pictures."""
    # What is enlarged shows its pixels.
    is_small = max(image.shape) < _SIDE
    how = Image.Resampling.NEAREST if is_small else Image.Resampling.BICUBIC
    return ImageOps.contain(Image.fromarray(image), (_SIDE, _SIDE), how)
