"""Decodes picture files, in the same way for training and for prediction.

Results are RGB, 0 to 255. A picture of the requested size keeps all its pixels.
"""

import io
import math
import os
import re
import struct
import time
import zlib
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from cifar10 import files
from cifar10.errors import UsageError, reason

# More pixels than usual cameras have. A small file may claim any number, and decoding
# takes up to 12 bytes per pixel, 600 MB in all.
MAX_PIXELS = 50_000_000
MAX_BYTES = 50_000_000
# CPU time for one picture. The largest photographs take about one second; a file with
# very many parts, such as the scans of a JPEG file, would take minutes.
MAX_SECONDS = 10.0
# Bytes per read, each of which checks the CPU time. A JPEG scan usually has more.
_READ_BYTES = 4096

# A JPEG file is decoded at 1/2, 1/4 or 1/8 of its size if the result is at least this
# multiple of the requested size. Compared with resizing the full picture, photographs
# at 64 x 64 differ by 37 dB, as much as with torchvision's filter (dev/LOG.md).
_DRAFT = 1.25

# The first bytes of each kind of file, and the Pillow class that reads such files. TIFF
# is missing: Pillow decodes its tiles, of any number and size, without timed reads.
_KINDS: dict[bytes, type[ImageFile]] = {
    rb"\x89PNG\r\n\x1a\n": PngImageFile,
    rb"\xff\xd8\xff": JpegImageFile,
    rb"RIFF(?s:....)WEBP": WebPImageFile,
    rb"BM": BmpImageFile,
    rb"GIF8[79]a": GifImageFile,
}
START = re.compile(b"|".join(_KINDS))

# The optional chunks of a PNG file that change its pixels; all others are metadata.
_OF_PIXELS = (b"tRNS", b"acTL", b"fcTL", b"fdAT")
# A frame of a JPEG file in arithmetic coding, with its height and width. Its time is
# not checked, so it may have as many scans as make 20 times `MAX_PIXELS`.
_ARITHMETIC = re.compile(rb"\xff[\xc9-\xcb\xcd-\xcf]\0.\x08(..)(..)", re.DOTALL)


class PictureError(UsageError):
    """A file is not a usable image; the message says why."""


def read(path: Path) -> bytes:
    """Reads an image file, but at most `MAX_BYTES + 1` bytes of it."""
    try:
        with files.opened(path, follow=True) as file:
            # `read` allocates all the requested bytes in advance.
            return file.read(min(os.fstat(file.fileno()).st_size, MAX_BYTES) + 1)
    except Exception as error:  # From the system or an invalid path.
        raise PictureError(f"{path} cannot be read: {reason(error)}.") from error


def decode(
    content: bytes, name: str, height: int, width: int, *, max_pixels: int = MAX_PIXELS
) -> np.ndarray:
    """Decodes the content of an image file to uint8 [height, width, 3].

    The image is rotated as its EXIF data say, transparent areas become white, and the
    sides are cropped to the requested proportions. Each pixel of the result is an
    average over all pixels that it covers. Of an animation, only the first frame is
    used. The content determines the kind of file; the `name` is only for messages.
    """
    try:
        try:
            return _fitted(_opened(content, max_pixels), content, height, width)
        except PictureError:
            raise
        except Exception:  # Pillow raises anything for damaged metadata, too.
            bare, read_bytes = _without_metadata(content)
            if (bare, read_bytes) == (content, _READ_BYTES):
                raise
            image = _opened(bare, max_pixels)
            image.decodermaxblock = read_bytes
            return _fitted(image, bare, height, width)
    except PictureError as error:
        raise PictureError(f"{name} {error}") from error
    except Exception as error:  # Pillow raises anything for a damaged file.
        raise PictureError(f"{name} is damaged: {reason(error)}.") from error


def is_picture(content: bytes) -> bool:
    """Returns whether content begins like a format that can be decoded."""
    return START.match(content) is not None


class _TimedFile(io.BytesIO):
    """The content of a picture file, which can be read for a limited CPU time."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        # The CPU time of this thread, so that a busy machine refuses no picture.
        self._end = time.thread_time() + MAX_SECONDS

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads like a file; raises a `PictureError` when the time is over."""
        if time.thread_time() > self._end:
            raise PictureError(f"takes more than {MAX_SECONDS:g} s to decode.")
        return super().read(size)


def _opened(content: bytes, max_pixels: int) -> ImageFile:
    """Opens a picture and checks its kind and size, without decoding the picture."""
    if not content:
        raise PictureError("is empty.")
    if len(content) > MAX_BYTES:
        raise PictureError(f"has more than {MAX_BYTES:,} bytes.")
    kinds = (kind for start, kind in _KINDS.items() if re.match(start, content))
    if (kind := next(kinds, None)) is None:
        why = "is neither a PNG nor a JPEG, WebP, BMP or GIF image"
        raise PictureError(f"{why}. Convert it to JPEG.")
    # Not `Image.open`, whose limit on pixels holds for the whole process.
    image = kind(_TimedFile(content))
    image.decodermaxblock = _READ_BYTES
    if image.width * image.height > max_pixels:
        size = f"{image.width:,} x {image.height:,} pixels, over {max_pixels:,}"
        raise PictureError(f"has {size}. Make the picture smaller.")
    return image


def _without_metadata(content: bytes) -> tuple[bytes, int]:
    """Returns content without the metadata that trouble Pillow, and bytes per read.

    An intact orientation is kept. libjpeg decodes arithmetic coding only in one read.
    """
    if frame := content.startswith(b"\xff") and _ARITHMETIC.search(content):
        pixels = math.prod(map(int.from_bytes, frame.groups()))
        if pixels * content.count(b"\xff\xda") > 20 * MAX_PIXELS:
            raise PictureError("takes too long to decode.")
    if not content.startswith(b"\x89"):
        bare = content.replace(b"Photoshop 3.0\0", b"Photoshop 3.0-")
        return bare, len(content) if frame else _READ_BYTES
    file = _TimedFile(content)
    kept = [file.read(8)]
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        body = file.read(length + 4)
        is_sound = zlib.crc32(body[:-4], zlib.crc32(kind)).to_bytes(4) == body[-4:]
        if kind[:1].isupper() or kind in _OF_PIXELS or (kind == b"eXIf" and is_sound):
            kept += head, body
    return b"".join(kept), _READ_BYTES


def _orientation(image: Image.Image) -> int:
    """Returns an image's EXIF orientation; 1 if it cannot be read."""
    try:
        found = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 - Pillow raises anything for damaged metadata.
        return 1
    return int(found) if found in range(1, 9) else 1


def _transparent(image: ImageFile, content: bytes) -> np.ndarray | None:
    """Returns which pixels have the one transparent colour of a PNG file.

    Returns None without such a colour, in palettes, and at depths of 1 and 8 bits.
    """
    colour = image.info.get("transparency")
    depth = content[24] if isinstance(image, PngImageFile) else 8
    if colour is None or image.mode == "P" or depth in (1, 8):
        return None
    pixels = np.asarray(image)
    if image.mode != "RGB":
        return pixels == colour * {2: 85, 4: 17, 16: 1}[depth]
    # Pillow reads the upper byte of each value, or the lower as if it were the upper.
    lower = _opened(content, pixels.size)
    lower.tile = [tile._replace(args="RGB;16L") for tile in lower.tile]
    whole = pixels * np.uint16(256) + np.asarray(lower)
    return (whole == np.array(colour, np.uint16)).all(axis=2)


def _fitted(image: ImageFile, content: bytes, height: int, width: int) -> np.ndarray:
    """Decodes an image, turns it upright, and converts it to the given size and RGB."""
    if isinstance(image, JpegImageFile):  # Before `load`, which then decodes less.
        side = int(_DRAFT * max(height, width))  # The image may be rotated below.
        image.draft(None, (side, side))
    image.load()
    upright: Image.Image = image
    orientation = _orientation(image)
    highest = 0
    if image.mode.startswith("I"):  # 16-bit grey, which `convert` would clip.
        pixels = np.asarray(image)
        highest = int(pixels.max())
        upright = Image.fromarray((pixels >> 8).astype(np.uint8))
    elif image.format == "PNG" and image.mode[:3] == "RGB" and content[24] == 16:
        pixels = np.asarray(image)  # Pillow reads the upper bytes.
        # Dark shapes on a transparent ground will be on white.
        if pixels[..., 3:].min(initial=255) == 255:
            upper = int(pixels[..., :3].max())
            highest = upper and 255 + 256 * upper
    if 0 < highest < 2**12:  # Values of 12 bits are stored in 16, too.
        why = f"its 16-bit values are at most {highest}, and would be black"
        raise PictureError(f"{why} in 8 bits: scale them to 65535")
    if (transparent := _transparent(image, content)) is not None:
        upright = upright.convert("RGB")  # A copy, as the alpha channel is added to it.
        upright.putalpha(Image.fromarray(np.where(transparent, 0, 255).astype("uint8")))
    mode = "RGBA" if upright.has_transparency_data else "RGB"
    if upright.mode != mode:  # `convert` copies the image even if nothing changes.
        upright = upright.convert(mode)
    # Resize before the other steps, so that they copy only small images. Orientations
    # from 5 to 8 exchange width and height.
    size = (height, width) if orientation >= 5 else (width, height)
    upright = ImageOps.fit(upright, size, Image.Resampling.BICUBIC)
    if orientation != 1:
        # A copy without other EXIF data, which raise errors if they are malformed.
        upright = Image.fromarray(np.asarray(upright))
        upright.getexif()[ExifTags.Base.Orientation] = orientation
        ImageOps.exif_transpose(upright, in_place=True)
    if upright.mode == "RGBA":
        white = Image.new("RGBA", upright.size, "white")
        upright = Image.alpha_composite(white, upright).convert("RGB")
    return np.asarray(upright)
