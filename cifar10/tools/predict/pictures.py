"""Reads PNG and JPEG files of any size as images like those of the data set.

The results hold what the data set's files hold: red, green and blue in 0 to 255. An
image that has the right size already is returned unchanged, pixel for pixel.
"""

import io
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageFile, ImageOps
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from cifar10.config import regular_files
from cifar10.errors import UsageError, reason

# More than cameras have; a small file may claim any number. Decoding takes up to 12
# bytes per pixel, 600 MB in all.
MAX_PIXELS = 50_000_000
MAX_BYTES = 50_000_000
# Reading many parts takes Pillow minutes, even if they are empty. Encoders write some
# ten scans, and PNG's data in chunks of 8 kB.
MAX_SCANS = 100
MAX_PARTS = 20_000

# The marker of a JPEG segment, but for those without a length, and that length.
_SEGMENT = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])(..|)", re.DOTALL)
_START_OF_SCAN = b"\xda"
_END_OF_IMAGE = b"\xd9"

_PLUGINS: dict[bytes, type[ImageFile.ImageFile]] = {
    b"\x89PNG\r\n\x1a\n": PngImageFile,
    b"\xff\xd8\xff": JpegImageFile,
}

# The orientations that exchange width and height.
_SIDEWAYS = range(5, 9)


class PictureError(UsageError):
    """A file is not a usable image; the message says why."""


def find(names: Sequence[str], lines: Iterable[str]) -> list[Path]:
    """Returns the files that the names on a command line stand for.

    Args:
        names: Files; folders, which stand for all files in and below them except hidden
            ones and pipes or devices; and `-`, which stands for `lines`.
        lines: Names of files, one per line.
    """
    found: list[Path] = []
    for name in names:
        if name == "-":
            found += [Path(line) for line in map(str.strip, lines) if line]
        elif os.path.isdir(name):  # noqa: PTH112 - `Path.is_dir` raises.
            found += _in_folder(Path(name))
        else:
            found.append(Path(name))
    if not found:
        places = ", ".join("standard input" if name == "-" else name for name in names)
        raise UsageError(f"There are no files in {places}; name an image.")
    return found


def _in_folder(folder: Path) -> list[Path]:
    paths = sorted(folder.rglob("*"))
    return [
        path
        for path in paths
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        # What does not exist, such as a broken link, is reported when it is read. The
        # methods of `Path` raise if this user may not look.
        and (os.path.isfile(path) or not os.path.exists(path))  # noqa: PTH110, PTH113
    ]


def read(path: Path) -> bytes:
    """Reads the file of an image, to at most one byte more than it may have."""
    try:
        with regular_files.opened(path, follow=True) as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: the path holds a zero byte.
        raise PictureError(f"{path} cannot be read: {reason(error)}.") from error


def decode(
    content: bytes,
    name: str,
    height: int,
    width: int,
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Decodes a PNG or JPEG file and resizes its image.

    The image is turned as its EXIF data say, transparent parts become white, the sides
    are cropped to the right proportions, and each pixel of the result is an average
    over all pixels that it covers. Messages call it by its `name`.

    Returns:
        uint8 [height, width, 3].
    """
    if len(content) > MAX_BYTES:
        raise PictureError(f"{name} has more than {MAX_BYTES:,} bytes.")
    plugin = next(
        (_PLUGINS[start] for start in _PLUGINS if content.startswith(start)), None
    )
    if plugin is None:
        raise PictureError(f"{name} is neither a PNG nor a JPEG image.")
    parts = Counter(itertools.islice(_parts(content, plugin), MAX_PARTS))
    if parts.total() == MAX_PARTS or parts[_START_OF_SCAN] > MAX_SCANS:
        raise PictureError(f"{name} has far more parts than it needs; save it anew.")
    try:
        # Not `Image.open`, whose limit on pixels holds for the whole process.
        image = plugin(io.BytesIO(content))
        if image.width * image.height <= max_pixels:
            return np.asarray(_fitted(image, height, width))
    except Exception as error:  # Pillow raises anything for a damaged file.
        raise PictureError(f"{name} is damaged: {reason(error)}.") from error
    raise PictureError(
        f"{name} has {image.width:,} x {image.height:,} pixels; at most "
        f"{max_pixels:,} are read. Make it smaller."
    )


def _parts(content: bytes, plugin: type[ImageFile.ImageFile]) -> Iterator[bytes]:
    """Yields the names of a PNG file's chunks, or the markers of a JPEG image."""
    place = 8
    while plugin is PngImageFile and place < len(content):
        yield content[place + 4 : place + 8]
        place += 12 + int.from_bytes(content[place : place + 4])
    place = 2
    while plugin is JpegImageFile and (segment := _SEGMENT.search(content, place)):
        if segment[1] == _END_OF_IMAGE:  # Telephones append a film.
            return
        yield segment[1]
        place = segment.end() + max(0, int.from_bytes(segment[2]) - 2)


def _fitted(image: Image.Image, height: int, width: int) -> Image.Image:
    """Returns an image upright, in the given size, and in red, green and blue."""
    image.load()
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    if image.mode.startswith("I"):  # 16-bit grey, which `convert` would clip.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    mode = "RGBA" if image.has_transparency_data else "RGB"
    if image.mode != mode:  # `convert` would copy the large image.
        image = image.convert(mode)
    # Resized before the rest, which saves copies of the large image.
    size = (height, width) if orientation in _SIDEWAYS else (width, height)
    image = ImageOps.fit(image, size, Image.Resampling.BICUBIC)
    # A copy without the other EXIF data, of which odd ones would be an error.
    image = Image.fromarray(np.asarray(image))
    image.getexif()[ExifTags.Base.Orientation] = orientation
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "RGBA":
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image).convert("RGB")
    return image
