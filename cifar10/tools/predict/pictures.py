"""PNG and JPEG files of any size as images like those of the data set.

What comes out is what the data set's files hold: red, green and blue in 0 to 255. An
image that has the right size already comes out as it is, pixel for pixel.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile, ImageOps
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from cifar10.errors import UsageError, reason

# Beyond what cameras make; a file of some kilobytes may claim to have any number. A
# pixel takes up to 12 bytes while it is decoded, so that many take 600 MB.
MAX_PIXELS = 50_000_000
MAX_BYTES = 50_000_000

_SIGNATURES: dict[bytes, type[ImageFile.ImageFile]] = {
    b"\x89PNG\r\n\x1a\n": PngImageFile,
    b"\xff\xd8\xff": JpegImageFile,
}

# What Pillow raises for files that are cut off or not what they seem.
_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
    struct.error,
    zlib.error,
)

_ORIENTATION = 0x0112  # Of EXIF.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = {_UPRIGHT[number] for number in (5, 6, 7, 8)}


class PictureError(UsageError):
    """A file is no image that can be used; the message says why."""


def find(names: Sequence[str], listed: Iterable[str]) -> list[Path]:
    """Returns the files that some names stand for.

    Args:
        names: Files; folders, which stand for all files in them and below, without
            hidden ones and those that are no files on a disk; and `-`, which stands
            for `listed`.
        listed: Names of files, one a line.

    Raises:
        UsageError: There are none, or one of them has no name.
    """
    if "" in names:
        raise UsageError("The name of an image is empty; name a file or a folder.")
    found: list[Path] = []
    for name in names:
        folder = Path(name)
        if name == "-":
            found += [Path(line) for line in map(str.strip, listed) if line]
        elif os.path.isdir(name):  # noqa: PTH112 - `Path.is_dir` raises.
            below = (path.relative_to(folder) for path in folder.rglob("*"))
            shown = (
                folder / path
                for path in sorted(below)
                if not any(part.startswith(".") for part in path.parts)
            )
            # What cannot be looked at is named when it is read.
            found += [path for path in shown if _is_file(path) or not _is_there(path)]
        else:
            found.append(folder)
    if not found:
        where = ", ".join("standard input" if name == "-" else name for name in names)
        raise UsageError(f"There are no files in {where}; name one that is an image.")
    return found


def read(path: Path, height: int, width: int) -> np.ndarray:
    """Reads an image from a file.

    Args:
        path: A PNG or JPEG file.
        height: Height of the result.
        width: Its width.

    Returns:
        uint8 [height, width, 3].

    Raises:
        PictureError: It is none, or cannot be read.
    """
    try:
        if path.is_dir():
            raise PictureError(f"{path} is a folder, not an image.")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # A path may not hold a zero byte.
        raise PictureError(f"{path} cannot be read: {reason(error)}.") from error
    return decode(content, str(path), height, width)


def decode(
    content: bytes,
    name: str,
    height: int,
    width: int,
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Makes an image of the content of a PNG or JPEG file.

    It is turned as its EXIF data say; transparent parts are put on white; the largest
    centred part of the right proportions is taken, and each pixel of the result is an
    average of all pixels that lie under it.

    Args:
        content: The file's bytes.
        name: What to call it in messages.
        height: Height of the result.
        width: Its width.
        max_pixels: The most pixels to decode.

    Returns:
        uint8 [height, width, 3].

    Raises:
        PictureError: It is damaged, too large or no such file.
    """
    if len(content) > MAX_BYTES:
        raise PictureError(f"{name} has more than {MAX_BYTES:,} bytes.")
    plugin = next(
        (one for start, one in _SIGNATURES.items() if content.startswith(start)), None
    )
    if plugin is None:
        raise PictureError(f"{name} is neither a PNG nor a JPEG image.")
    try:
        # Not `Image.open`, whose limit on the number of pixels is one of the process.
        image: Image.Image = plugin(io.BytesIO(content))
        pixels = image.width * image.height
        if pixels > max_pixels:
            raise PictureError(
                f"{name} has {image.width:,} x {image.height:,} pixels; the most that "
                f"are read are {max_pixels:,}. Make it smaller."
            )
        image.load()
        # Not `ImageOps.exif_transpose`, which writes all of the EXIF data anew.
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
        image = _resizable(image)
        # Turned and put on white when it is small, which saves copies of all of it.
        sideways = turn in _SIDEWAYS
        size = (height, width) if sideways else (width, height)
        image = ImageOps.fit(image, size, Image.Resampling.BICUBIC)
        if turn is not None:
            image = image.transpose(turn)
        image = _in_colour(image)
    except _DAMAGE as error:
        raise PictureError(f"{name} is damaged: {reason(error)}.") from error
    return np.asarray(image)


def _resizable(image: Image.Image) -> Image.Image:
    """Returns an image in a mode in which averages of pixels mean something."""
    if image.mode.startswith("I"):
        return image
    if image.has_transparency_data:
        wanted = "RGBA"
    else:
        wanted = "L" if image.mode == "L" else "RGB"
    return image if image.mode == wanted else image.convert(wanted)


def _in_colour(image: Image.Image) -> Image.Image:
    """Returns a resizable image as red, green and blue."""
    if image.mode.startswith("I"):  # 16 bits of grey, which `convert` would cut off.
        grey = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(grey.clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def _is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113 - `Path.is_file` raises.


def _is_there(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - `Path.exists` raises.
