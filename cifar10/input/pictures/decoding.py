"""The bytes of a picture's file to pixels: one rule for training and for predicting.

The results are red, green and blue in 0 to 255. A picture that has the right size
already is returned unchanged, pixel for pixel.
"""

import io
import itertools
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageFile, ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from cifar10.errors import UsageError, reason
from cifar10.process import files

# More than cameras have; a small file may claim any number. Decoding takes up to 12
# bytes per pixel, 600 MB in all.
MAX_PIXELS = 50_000_000
MAX_BYTES = 50_000_000
# Reading many parts takes Pillow minutes, even if they are empty. Encoders write some
# ten scans, and PNG's data in chunks of 8 kB.
MAX_SCANS = 100
MAX_PARTS = 20_000
# Each scan of a JPEG file is decoded to the size of the whole: ten of the largest take
# three seconds.
_MAX_SCANNED = 12 * MAX_PIXELS
# Pillow unpacks run lengths in Python, pixel by pixel at the ends of lines.
_MAX_RUN_LENGTHS = 4_000_000

# A JPEG file may be decoded at 1/2, 1/4 or 1/8 down to this multiple of the requested
# size, before it is resized. Compared with resizing the full picture, photographs at
# 64 x 64 differ by 37 dB, as much as with torchvision's filter (`docs/lab-notes.md`).
_DRAFT = 1.25

# The marker of a JPEG segment that has a length, and that length.
_SEGMENT = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])(..|)", re.DOTALL)
_START_OF_SCAN = b"\xda"
_END_OF_IMAGE = b"\xd9"

# What the file of each kind begins with, and what reads it.
_KINDS: dict[str, tuple[re.Pattern[bytes], type[ImageFile.ImageFile]]] = {
    "PNG": (re.compile(rb"\x89PNG\r\n\x1a\n"), PngImageFile),
    "JPEG": (re.compile(rb"\xff\xd8\xff"), JpegImageFile),
    "WebP": (re.compile(rb"RIFF....WEBP", re.DOTALL), WebPImageFile),
    "BMP": (re.compile(rb"BM"), BmpImageFile),
    "GIF": (re.compile(rb"GIF8[79]a"), GifImageFile),
    "TIFF": (re.compile(rb"II\*\0|MM\0\*"), TiffImageFile),
}
KINDS = tuple(_KINDS)
_START_BYTES = 12  # The longest of them.

# What telephones write, and Pillow alone does not read.
_HEIF = re.compile(rb"....ftyp(hei[cfmsx]|hev[cmsx]|mif1|msf1|avi[fs])", re.DOTALL)

# Of a TIFF file: the bytes of a value of some types, and the tags of where strips or
# tiles are and of descriptions beside the image's.
_VALUE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 6: 1, 7: 1, 8: 2, 9: 4, 11: 4, 13: 4}
_TILE_OFFSETS = 324
_TILES = (273, _TILE_OFFSETS)
_TILE_SIDES, _SHORT = (322, 323), 3
_MAX_TILED = (
    4  # Pixels of all tiles, for each of the image: those at edges reach beyond.
)
_BESIDE = (330, 34665, 34853, 40965)

# The orientations that exchange width and height.
_SIDEWAYS = range(5, 9)


class PictureError(UsageError):
    """A file is not a usable image; the message says why."""


class UnreadableError(PictureError):
    """A file's content could not be read: the fault may not be in the picture."""


def read(path: Path, name: str = "") -> bytes:
    """Reads the file of an image, to at most one byte more than it may have.

    Messages call it by its `name`, or by its path if it has none.
    """
    try:
        with files.opened(path, follow=True) as file:
            # Python allocates as many bytes as it is asked to read at once.
            usual = os.fstat(file.fileno()).st_size + 1
            content = file.read(min(usual, MAX_BYTES + 1))
            more = len(content) == usual  # Some file systems say less.
            return content + file.read(MAX_BYTES + 1 - usual) if more else content
    except (OSError, ValueError) as error:  # ValueError: the path holds a zero byte.
        problem = f"{name or path} cannot be read: {reason(error)}."
        raise UnreadableError(problem) from error


def size(path: Path, name: str = "") -> tuple[int, int]:
    """Returns width and height of the picture in a file, from its first bytes.

    These are the stored ones: EXIF data may turn the picture.
    """
    try:
        with files.opened(path, follow=True) as file:
            start = file.read(_START_BYTES)
            plugin = next(p for begin, p in _KINDS.values() if begin.match(start))
            file.seek(0)
            return plugin(file).size
    except Exception as error:  # As in `decode`; it has changed since then.
        problem = f"{name or path} cannot be read any more: {reason(error)}."
        raise UnreadableError(problem) from error


def decode(
    content: bytes,
    name: str,
    height: int,
    width: int,
    *,
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Decodes the content of a file and resizes its image.

    The image is turned as its EXIF data say, transparent parts become white, the sides
    are cropped to the right proportions, and each pixel of the result is an average
    over all pixels that it covers. Of an animation only the first frame is taken. Only
    the content of the file counts, not its name; messages call it by its `name`.

    Returns:
        uint8 [height, width, 3].
    """
    if len(content) > MAX_BYTES:
        raise PictureError(f"{name} has more than {MAX_BYTES:,} bytes.")
    kind = next((kind for kind in KINDS if _KINDS[kind][0].match(content)), None)
    if kind is None:
        raise PictureError(f"{name} {_unknown(content)}")
    try:
        image = _opened(content, kind, max_pixels)
        return np.asarray(_fitted(image, height, width))
    except _RefusedError as error:
        raise PictureError(f"{name} {error}") from error
    except Exception as error:  # Pillow raises anything for a damaged file.
        is_short = isinstance(error, struct.error)
        why = "it ends too early" if is_short else reason(error).rstrip(".")
        raise PictureError(f"{name} is damaged: {why}.") from error


class _RefusedError(Exception):
    """A picture is not decoded, as the message says after its name."""


_TOO_MANY_PARTS = "has far more parts than it needs; save it again."


def _unknown(content: bytes) -> str:
    """Returns what is wrong with a file of no known kind."""
    if _HEIF.match(content):
        return (
            "is a HEIC or AVIF image, which is not read. Convert it to JPEG, as with: "
            "heif-convert NAME.heic NAME.jpg"
        )
    return f"is neither {' nor '.join(f'a {kind}' for kind in KINDS)} image."


def _opened(content: bytes, kind: str, max_pixels: int) -> ImageFile.ImageFile:
    """Returns a picture that has been looked at, but not decoded."""
    parts = Counter(itertools.islice(_parts(content, kind), MAX_PARTS))
    scans = parts[_START_OF_SCAN]
    if parts.total() == MAX_PARTS or scans > MAX_SCANS:
        raise _RefusedError(_TOO_MANY_PARTS)
    if kind == "TIFF":
        content = _single(content, max_pixels)
    # Not `Image.open`, whose limit on pixels holds for the whole process.
    image = _KINDS[kind][1](io.BytesIO(content))
    pixels = image.width * image.height
    if pixels > max_pixels:
        raise _RefusedError(
            f"has {image.width:,} x {image.height:,} pixels; at most {max_pixels:,} "
            "are read. Make it smaller."
        )
    if pixels * scans > _MAX_SCANNED:
        raise _RefusedError(_TOO_MANY_PARTS)
    has_runs = any(tile.codec_name == "bmp_rle" for tile in image.tile)
    if has_runs and pixels + len(content) > _MAX_RUN_LENGTHS:
        raise _RefusedError("is a BMP image in run lengths; save it without.")
    if image.mode == "F" or (kind == "TIFF" and image.mode == "I"):
        raise _RefusedError("has 32 bits a channel; save it with 8 or 16.")
    return image


def _single(content: bytes, max_pixels: int) -> bytes:
    """Returns a TIFF file without what is beside its first image.

    Pillow reads all values of an image, and may read them again for each other one; it
    unpacks whole tiles, however little of them is within the image.
    """
    order = "<" if content.startswith(b"II") else ">"
    (start,) = struct.unpack_from(f"{order}L", content, 4)
    (count,) = struct.unpack_from(f"{order}H", content, start)
    end = start + 2 + 12 * count
    single, values, tiled = bytearray(content), 0, 1
    for place in range(start + 2, end, 12):
        tag, kind, number = struct.unpack_from(f"{order}HHL", content, place)
        values += number * _VALUE_BYTES.get(kind, 8)
        if tag in _TILES and number > MAX_PARTS:
            raise _RefusedError(_TOO_MANY_PARTS)
        if tag == _TILE_OFFSETS:
            tiled *= number
        if tag in _TILE_SIDES:
            size = "H" if kind == _SHORT else "L"
            tiled *= struct.unpack_from(f"{order}{size}", content, place + 8)[0]
        if tag in _BESIDE:
            single[place + 2 : place + 4] = bytes(2)  # A type that nobody knows.
    if values > len(content) + 8 * count or tiled > _MAX_TILED * max_pixels:
        raise _RefusedError(_TOO_MANY_PARTS)
    single[end : end + 4] = bytes(4)  # There is no next image.
    return bytes(single)


def _gif_blocks(content: bytes) -> Iterator[bytes]:
    """Yields the extensions before a GIF file's first picture, each block of them."""
    flags = content[10] if len(content) > 10 else 0
    place = 13 + (3 << (flags % 8 + 1) if flags >= 128 else 0)  # Behind the colours.
    while content[place : place + 1] == b"!":
        place += 2
        while length := int.from_bytes(content[place : place + 1]):
            yield b"!"
            place += 1 + length
        yield b"!"
        place += 1


def _parts(content: bytes, kind: str) -> Iterator[bytes]:
    """Yields the names of a PNG file's chunks, or the markers of a JPEG image.

    Of a GIF file these are the blocks before its first picture.
    """
    if kind == "GIF":
        yield from _gif_blocks(content)
    place = 8
    while kind == "PNG" and place < len(content):
        yield content[place + 4 : place + 8]
        place += 12 + int.from_bytes(content[place : place + 4])
    place = 2
    while kind == "JPEG" and (segment := _SEGMENT.search(content, place)):
        if segment[1] == _END_OF_IMAGE:  # Telephones append a film.
            return
        yield segment[1]
        place = segment.end() + max(0, int.from_bytes(segment[2]) - 2)


def _fitted(image: ImageFile.ImageFile, height: int, width: int) -> Image.Image:
    """Returns an image upright, in the given size, and in red, green and blue."""
    if isinstance(image, JpegImageFile):  # Before `load`: it decodes less.
        side = int(_DRAFT * max(height, width))  # It may have to be turned.
        image.draft(None, (side, side))
    image.load()
    upright: Image.Image = image
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    if image.mode.startswith("I"):  # 16-bit grey, which `convert` would clip.
        upright = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    mode = "RGBA" if upright.has_transparency_data else "RGB"
    if upright.mode != mode:  # `convert` would copy the large image.
        upright = upright.convert(mode)
    # Resized before the rest, which saves copies of the large image.
    size = (height, width) if orientation in _SIDEWAYS else (width, height)
    upright = ImageOps.fit(upright, size, Image.Resampling.BICUBIC)
    if orientation != 1:
        # A copy without the other EXIF data, which would be an error if malformed.
        upright = Image.fromarray(np.asarray(upright))
        upright.getexif()[ExifTags.Base.Orientation] = orientation
        ImageOps.exif_transpose(upright, in_place=True)
    if upright.mode == "RGBA":
        white = Image.new("RGBA", upright.size, "white")
        upright = Image.alpha_composite(white, upright).convert("RGB")
    return upright
