"""PNG and JPEG files of any size as images like those of the data set.

What comes out is what the data set's files hold: red, green and blue in 0 to 255. An
image that has the right size already comes out as it is, pixel for pixel.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile, ImageOps
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from cifar10.errors import UsageError, reason

# Beyond what cameras make. Decoded, that many pixels take 200 MB; a file of some
# kilobytes may claim to have any number.
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
    OverflowError,
    struct.error,
    zlib.error,
)


class PictureError(UsageError):
    """A file is no image that can be used; the message says why."""


def find(names: Sequence[str], listed: Iterable[str]) -> list[Path]:
    """Returns the files that some names stand for.

    Args:
        names: Files; folders, which stand for all files in them and below, hidden ones
            left out; and `-`, which stands for `listed`.
        listed: Names of files, one a line.

    Raises:
        UsageError: There are none.
    """
    found: list[Path] = []
    for name in names:
        folder = Path(name)
        if name == "-":
            found += [Path(line) for line in map(str.strip, listed) if line]
        elif folder.is_dir():
            below = (path.relative_to(folder) for path in folder.rglob("*"))
            shown = (
                folder / path
                for path in sorted(below)
                if not any(part.startswith(".") for part in path.parts)
            )
            found += [path for path in shown if not path.is_dir()]
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


def decode(content: bytes, name: str, height: int, width: int) -> np.ndarray:
    """Makes an image of the content of a PNG or JPEG file.

    It is turned as its EXIF data say; transparent parts are put on white; the largest
    centred part of the right proportions is taken, and each pixel of the result is an
    average of all pixels that lie under it.

    Args:
        content: The file's bytes.
        name: What to call it in messages.
        height: Height of the result.
        width: Its width.

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
        if pixels > MAX_PIXELS:
            raise PictureError(
                f"{name} has {image.width:,} x {image.height:,} pixels; the most that "
                f"are read are {MAX_PIXELS:,}. Make it smaller."
            )
        image.load()
        fitted = ImageOps.fit(
            _in_colour(ImageOps.exif_transpose(image)),
            (width, height),
            Image.Resampling.BICUBIC,
        )
    except _DAMAGE as error:
        raise PictureError(f"{name} is damaged: {reason(error)}.") from error
    return np.asarray(fitted)


def _in_colour(image: Image.Image) -> Image.Image:
    """Returns an image of any mode as red, green and blue."""
    if image.mode.startswith("I"):  # 16 bits of grey, which `convert` would cut off.
        grey = np.asarray(image).astype(np.uint32) >> 8
        image = Image.fromarray(grey.astype(np.uint8))
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")
