"""Draws pictures in a grid, each below its text, as a PNG file."""

import io
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

_SIDE = 64  # Pixels of a picture's longer side.
_GAP = 4
_LINE = 20  # Height of a line of text.
_WIDTH = 684


def draw_grid(
    title: str, cells: Sequence[tuple[str, np.ndarray]], columns: int
) -> bytes:
    """Returns a PNG of a grid of cells, `columns` in a row.

    A cell is a text and a picture below it, uint8 [height, width, 3] or grey. Letters
    of the text that are not ASCII become question marks: Pillow's font lacks them.
    """
    row = _LINE + _SIDE + 2 * _GAP
    height = _LINE + math.ceil(len(cells) / columns) * row + _GAP
    sheet = Image.new("RGB", (_WIDTH, height), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    pen.text((_GAP, 2), title, "black", font)
    for place, (text, picture) in enumerate(cells):
        left = _GAP + place % columns * (_WIDTH // columns)
        top = _LINE + place // columns * row
        plain = text.encode("ascii", "replace").decode()
        pen.text((left, top + 2), plain, "black", font)
        # Pixels of small images show, because they are enlarged without interpolation.
        how = Image.Resampling.NEAREST
        shown = ImageOps.contain(Image.fromarray(picture), (_SIDE, _SIDE), how)
        sheet.paste(shown, (left, top + _LINE))
    content = io.BytesIO()
    sheet.save(content, "PNG")
    return content.getvalue()
