"""Helpers: one file of each kind that public test suites of pictures hold.

`png_files` computes by hand what each PNG file shows; `other_files` gives the files of
the other kinds. `as_pillow_shows` says what Pillow makes of a file: upright, and on
white. `python tests/helpers/picture_files.py FOLDER` compares all pictures in a folder
with that, and prints those that differ.
"""

import base64
import io
import itertools
import struct
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

# Coded by libjpeg-turbo: red grows to the right, green downwards.
_TABLES = (
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAMCAgMCAgMDAwMEAwMEBQgFBQQEBQoHBwYIDAoMDAsKCwsN"
    "DhIQDQ4RDgsLEBYQERMUFRUVDA8XGBYUGBIUFRT/2wBDAQMEBAUEBQkFBQkUDQsNFBQUFBQUFBQUFBQU"
    "FBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBT/"
)
ARITHMETIC = {
    "sequential": "yQARCAAQABADASIAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/AN4G"
    "p7rfXMXHJ443imuyLjWF1IjZrQUlLC/wT4q/INZBWinf4/ioRsYlyv/Z",
    "progressive": "ygARCAAQABADASIAAhEBAxEB/8wABgAQARD/2gAMAwEAAhADEAAAAf8Au/BB4H5I"
    "mP/MAAQQBf/aAAgBAQABBQIVm25HmvLBpeL/zAAEEQX/2gAIAQMBAT8BFnBJjvQg/8wABBEF/9oACAEC"
    "AQE/ATmPxoP/zAAEEAX/2gAIAQEABj8CXhT/zAAEEAX/2gAIAQEAAT8h14EMiP/aAAwDAQACAAMAAAAQ"
    "WP/MAAQRBf/aAAgBAwEBPxDWHeD/zAAEEQX/2gAIAQIBAT8QqOD/zAAEEAX/2gAIAQEAAT8QqLPy+PYQ"
    "gP/Z",
}
WIDTH, HEIGHT = 13, 11
# First column and row, and their distances, of the passes of an interlaced PNG file.
_PASSES = [
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
]


def chunk(kind, data):
    head = struct.pack(">I", len(data)) + kind
    return head + data + struct.pack(">I", zlib.crc32(kind + data))


def segment(marker, data):
    """Returns a segment of a JPEG file."""
    return bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data


def _rows(values, depth):
    """Packs values [height, width, channels] as the rows of a PNG file."""
    for row in values:
        if depth == 16:
            yield b"\0" + row.astype(">u2").tobytes()
        elif depth == 8:
            yield b"\0" + row.astype(np.uint8).tobytes()
        else:
            bits = (row.reshape(-1, 1) >> np.arange(depth)[::-1]) & 1
            yield b"\0" + np.packbits(bits.astype(np.uint8)).tobytes()


def png(values, depth, colour, *, interlaced=False, chunks=b""):
    """Returns a PNG file of values [height, width, channels] of so many bits."""
    height, width, _ = values.shape
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    images = [values]
    if interlaced:
        images = [values[y::down, x::right] for x, y, right, down in _PASSES]
    rows = (row for image in images if image.size for row in _rows(image, depth))
    data = zlib.compress(b"".join(rows))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunks
    return start + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def png_files():
    """Yields names, PNG files, and what they show: each colour type and depth."""
    depths = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
    random = np.random.default_rng(0)
    for colour, interlaced, clear in itertools.product(depths, (0, 1), (0, 1)):
        for depth in depths[colour] if clear == 0 or colour < 4 else ():
            shape = (HEIGHT, WIDTH, channels[colour])
            values = random.integers(0, 2**depth, shape)
            # Neighbours of the transparent colour, which are not transparent.
            values[0, :4] = values[1, 1]
            if depth == 16:
                values[0, 2:4] ^= [[1], [256]]
            palette = random.integers(0, 256, (2**depth, 4))
            shown = values * 255 // (2**depth - 1) if depth < 8 else values >> depth - 8
            chunks, alpha = b"", np.full((HEIGHT, WIDTH, 1), 255)
            if colour == 3:
                chunks = chunk(b"PLTE", palette[:, :3].astype(np.uint8).tobytes())
                shown = palette[values[..., 0], :3]
            elif colour in (4, 6):
                shown, alpha = shown[..., :-1], shown[..., -1:]
            if clear and colour == 3:
                chunks += chunk(b"tRNS", palette[:, 3].astype(np.uint8).tobytes())
                alpha = palette[values[..., 0], 3:]
            elif clear:
                chunks += chunk(b"tRNS", values[1, 1].astype(">u2").tobytes())
                alpha = np.where((values == values[1, 1]).all(2, keepdims=True), 0, 255)
            shown = np.rint((shown * alpha + 255 * (255 - alpha)) / 255)
            name = f"colour {colour}, {depth} bits, {interlaced=}, {clear=}"
            content = png(
                values, depth, colour, interlaced=bool(interlaced), chunks=chunks
            )
            yield name, content, np.broadcast_to(shown, (HEIGHT, WIDTH, 3))


def saved(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def other_files():
    """Yields names and files of the other kinds, and PNG files that are turned."""
    random = np.random.default_rng(1)
    smooth = random.integers(0, 256, (3, 4, 4), np.uint8)
    image = Image.fromarray(smooth, "RGBA").resize((WIDTH, HEIGHT), Image.BICUBIC)
    image.putpixel((0, 0), (1, 2, 3, 0))
    rgb = image.convert("RGB")
    for mode in ("L", "RGB", "CMYK"):
        for options in ({}, {"progressive": True}, {"optimize": True}, {"quality": 3}):
            content = saved(rgb.convert(mode), "JPEG", **options)
            yield f"JPEG, {mode}, {options}", content
    for sampling in ("4:4:4", "4:2:2", "4:2:0", "4:1:1"):
        yield f"JPEG, {sampling}", saved(rgb, "JPEG", subsampling=sampling)
    for kind, rest in ARITHMETIC.items():
        yield f"JPEG, arithmetic, {kind}", base64.b64decode(_TABLES + rest)
    for form, orientation in itertools.product(("PNG", "JPEG", "WEBP"), range(10)):
        exif = Image.Exif()
        exif[0x0112] = orientation
        content = saved(rgb, form, exif=exif)
        yield f"{form}, orientation {orientation}", content
        if orientation == 6 and form == "JPEG":
            xmp = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
            content = saved(rgb, form)
            yield "JPEG, XMP", content[:2] + segment(0xE1, xmp) + content[2:]
    for mode in ("1", "L", "P", "RGB", "RGBA"):
        yield f"BMP, {mode}", saved(image.convert(mode), "BMP")
    for mode in ("1", "L", "P", "RGB", "RGBA"):
        more = [image.rotate(90 * n).convert(mode) for n in (1, 2)]
        yield f"GIF, {mode}", saved(image.convert(mode), "GIF")
        yield (
            f"GIF, {mode}, animated",
            saved(image.convert(mode), "GIF", save_all=True, append_images=more),
        )
    for options in ({}, {"lossless": True}, {"save_all": True, "append_images": [rgb]}):
        yield f"WebP, {[*options]}", saved(rgb, "WEBP", **options)
        yield f"WebP, clear, {[*options]}", saved(image, "WEBP", **options)


def with_metadata():
    """Yields names, files with sound or broken metadata, and those without them."""
    pixels = np.random.default_rng(2).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    image = Image.fromarray(pixels)
    plain, jpeg = png(pixels, 8, 2), saved(image, "JPEG", dpi=(72, 72))
    broken = b"Exif\0\0garbage!garbage!", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0"
    profile = b"ICC\0\0" + zlib.compress(bytes(2_000_000))
    text = b"a\0" + bytes(2_000_000)
    chunks = [
        *(b"iCCP" + profile, b"iCCP", b"iCCPno end", b"iCCPa\0\7", b"zTXta\0\7"),
        *(b"zTXta\0\0" + zlib.compress(bytes(2_000_000)), b"iTXta", b"tEXt" + text),
        *(b"iTXtXML:com.adobe.xmp\0\0\0\0\0<tiff:Orientation=", b"pHYs", b"gAMA\0"),
        b"zTXtRaw profile type exif\0\0" + zlib.compress(b"\nexif\n 4\nzz"),
        *(b"eXIf" + one[6:] for one in broken),
    ]
    for number, data in enumerate(chunks):
        made = chunk(data[:4], data[4:])
        yield f"PNG, {number} {data[:4]!r}", plain[:33] + made + plain[33:], plain
        yield f"PNG, {number} last", plain[:-12] + made + plain[-12:], plain
        spoiled = plain[:33] + made[:-1] + b"?" + plain[33:]
        yield f"PNG, {number} checksum", spoiled, plain
    for number, one in enumerate(broken):
        extra = segment(0xE1, one)
        yield f"JPEG, EXIF {number}", jpeg[:2] + extra + jpeg[2:], jpeg
        webp = saved(image, "WEBP", lossless=True)
        yield (
            f"WebP, EXIF {number}",
            saved(image, "WEBP", lossless=True, exif=one),
            webp,
        )
    for marker, data in (
        (0xED, b"Photoshop 3.0\x008BIM\3\xed\0\0\0\0\0\1a"),
        (0xE2, b"ICC_PROFILE\0\7\1no profile"),
        (0xE2, b"MPF\0garbage"),
        (0xFE, b"\xff" * 1000),
        (0xE1, b"http://ns.adobe.com/xap/1.0/\0\xff<"),
        (0xE5, b""),
    ):
        extra = segment(marker, data)
        yield f"JPEG, {marker:#x} {data[:9]!r}", jpeg[:2] + extra + jpeg[2:], jpeg


def as_pillow_shows(content):
    """Returns the pixels that Pillow shows, upright and on white, as uint8."""
    with warnings.catch_warnings(action="ignore"):
        image = Image.open(io.BytesIO(content))
        image.load()
        upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        return np.repeat((np.asarray(upright) >> 8)[..., None], 3, 2).astype(np.uint8)
    pixels = np.asarray(upright.convert("RGBA")).astype(float)
    colours, alpha = pixels[..., :3], pixels[..., 3:] / 255
    return np.rint(colours * alpha + 255 * (1 - alpha)).astype(np.uint8)


def main(folder):
    """Prints the pictures of a folder that the package shows otherwise than Pillow.

    Pillow is wrong for a transparent colour of 2, 4 or 16 bits in a PNG file.
    """
    from cifar10.input.pictures import decoding, listing

    contents = {
        path: content
        for path in listing.list_pictures(Path(folder))
        if decoding.is_picture(content := path.read_bytes())
    }
    differing = 0
    for path, content in contents.items():
        found = expected = "refused"
        try:
            expected = as_pillow_shows(content)
            height, width, _ = expected.shape
            found = decoding.decode(content, "it", height, width)
        except decoding.PictureError as error:
            found = f"refused: {error}"
        except Exception as error:  # noqa: BLE001 - of Pillow, in any damaged file.
            expected = f"no picture for Pillow: {error}"
        if isinstance(found, str) and isinstance(expected, str):
            continue
        if isinstance(found, str) or isinstance(expected, str):
            said = found if isinstance(found, str) else expected
        elif (most := int(np.abs(found.astype(int) - expected).max())) <= 1:
            continue
        else:
            said = f"differs by up to {most}"
        differing += 1
        print(f"{path}: {said}")
    print(
        f"{len(contents):,} pictures of the kinds that are read, {differing:,} differ"
    )


if __name__ == "__main__":
    main(sys.argv[1])
