"""Pictures of every kind to pixels, as training and predicting see them."""

import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from cifar10.input.pictures import decoding
from picture_files import png
from small_folders import packed, pixels
from small_pictures import (
    HALVES,
    PIXELS,
    bomb,
    with_chunks,
    with_scans,
    with_segments,
)

KINDS = ["PNG", "JPEG", "WEBP", "BMP", "GIF"]
RED, BLUE = (255, 0, 0), (0, 0, 255)


def decode(content, size=16):
    return decoding.decode(content, "it", size, size)


@pytest.mark.parametrize("form", KINDS)
def test_the_shorter_side_is_resized_and_the_centre_cut(form):
    wide = np.zeros((100, 300, 3), np.uint8)
    wide[:, 100:200] = np.asarray(Image.fromarray(HALVES).resize((100, 100)))
    image = decode(packed(wide, form)).astype(int)
    assert (image.shape, image.dtype) == ((16, 16, 3), int)
    assert np.abs(image[:, :7] - RED).max() < 30
    assert np.abs(image[:, 9:] - BLUE).max() < 30
    # A smaller image is an average and not a selection.
    board = (np.indices((320, 320)).sum(0) % 2 * 255).astype(np.uint8)
    assert np.ptp(decode(packed(board, form), 32)) <= 30


@pytest.mark.parametrize("form", ["PNG", "BMP", "WEBP"])
def test_a_picture_of_the_right_size_is_unchanged_bit_for_bit(form):
    options = {"lossless": True} if form == "WEBP" else {}
    content = packed(pixels(1, 33), form, **options)
    np.testing.assert_array_equal(decode(content, 33), pixels(1, 33))


def test_a_jpeg_file_is_decoded_small_without_loss_of_quality():
    """Against its pixels without a loss, which are decoded whole."""
    smooth = Image.fromarray(pixels(3, 6)).resize((1200, 900), Image.Resampling.BICUBIC)
    detailed = Image.fromarray(pixels(3, 16)).resize((64, 64), Image.Resampling.NEAREST)
    for image, size, most in [(smooth, 64, 6), (detailed, 16, 30)]:
        content = packed(image, "JPEG", quality=95)
        whole = packed(Image.open(io.BytesIO(content)))
        difference = decode(content, size) - decode(whole, size).astype(int)
        assert 0 < np.abs(difference).max() <= most, "it was not decoded small"


def test_an_animation_is_its_first_frame():
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, BLUE, BLUE)]
    for form in ("GIF", "WEBP", "PNG"):
        content = packed(frames[0], form, save_all=True, append_images=frames[1:])
        assert np.abs(decode(content).astype(int) - RED).max() < 20


def palette(colour, **options):
    image = Image.new("P", (20, 20), 1)
    image.putpalette([0, 0, 0, *colour])
    return packed(image, **options)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (packed(Image.new("LA", (20, 20), (0, 51))), (204, 204, 204)),
        (packed(Image.new("RGBA", (20, 20), (0, 0, 0, 51))), (204, 204, 204)),
        (palette((10, 20, 30), transparency=1), (255, 255, 255)),
        (packed(np.full((20, 20), 0xC8FF, np.uint16)), (200, 200, 200)),
        (packed(np.zeros((20, 20), np.uint16)), (0, 0, 0)),
        (png(np.zeros((20, 20, 3), int), 16, 2), (0, 0, 0)),
        (png(np.full((20, 20, 2), [0, 65535]), 16, 4), (0, 0, 0)),
        (png(np.full((20, 20, 2), [4096, 65535]), 16, 4), (16, 16, 16)),
        (png(np.full((20, 20, 4), [9, 9, 900, 0x33FF]), 16, 6), (204, 204, 205)),
        (packed(Image.new("CMYK", (20, 20), (0, 255, 255, 0)), "JPEG"), (255, 0, 0)),
    ],
)
def test_every_mode_becomes_red_green_and_blue(content, expected):
    assert np.abs(decode(content).astype(int) - expected).max() <= 3


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_a_picture_whose_orientation_cannot_be_read_is_taken_as_it_is(form):
    wide = Image.new("RGB", (40, 32), (200, 10, 10))
    content = packed(wide, form, exif=b"Exif\0\0garbage")
    found = decoding.decode(content, "it", 32, 40)
    np.testing.assert_allclose(found, np.asarray(wide), atol=8)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_undone(orientation):
    """Compared with what Pillow makes of the whole image."""
    tall = np.random.default_rng(orientation).integers(0, 256, (90, 60, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for form in ("PNG", "JPEG", "WEBP"):
        content = packed(tall, form, exif=exif)
        upright = packed(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
        made = decoding.decode(content, "it", 20, 32).astype(int)
        expected = decoding.decode(upright, "it", 20, 32)
        assert np.abs(made - expected).max() <= 1


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "empty"),
        (b"no picture", "neither"),
        (packed(PIXELS)[:-200], "damaged"),
        (bytes(4) + b"ftypheic", "neither"),
        (packed(PIXELS, "TIFF"), "neither"),
        (bomb(0, 10), "damaged"),
        (packed(np.arange(400, dtype=np.uint16).reshape(20, 20)), "at most 399"),
        (packed(np.full((20, 20), 4095, np.uint16)), "at most 4095"),
        (png(np.full((9, 9, 3), 900), 16, 2), "at most 1023"),
        (png(np.full((9, 9, 4), [900, 900, 900, 65535]), 16, 6), "at most 1023"),
        (png(np.full((9, 9, 2), [4095, 65535]), 16, 4), "at most 4095"),
        (packed(PIXELS) + bytes(decoding.MAX_BYTES), "50,000,000"),
    ],
)
def test_unusable_files_are_refused(content, named):
    with pytest.raises(decoding.PictureError, match=named):
        decode(content)


# ---- more than a picture needs


@pytest.mark.parametrize(
    "content",
    [
        with_scans(80),
        with_chunks(1000),
        # A small image beside the image, and a film after it, have their own scans.
        with_segments(1, b"\xff\xe1\1\xff" + b"\xff\xda" * 255 + b"."),
        packed(PIXELS, "JPEG") + b"\xff\xda" * 30_000,
    ],
)
def test_a_picture_may_have_many_parts(content):
    assert decode(content).shape == (16, 16, 3)


def with_comments(count):
    """Returns a GIF file with comments before its picture."""
    head = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0x80, 0, 0) + bytes(6)
    return head + b"!\xfe\x01x\0" * count + b",\0\0\0\0\x08\0\x08\0\0\x02\0;"


def with_run_lengths(side):
    """Returns a square BMP file whose lines end after a pixel."""
    lines, start = b"\x01a\0\0" * side, 54 + 1024
    info = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, 0, 0, 0, 256, 0)
    head = b"BM" + struct.pack("<IHHI", start + len(lines), 0, 0, start)
    return head + info + bytes(1024) + lines


def test_very_many_pixels_are_refused_before_they_are_decoded(monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    with pytest.raises(decoding.PictureError, match="30,000 x 30,000"):
        decode(bomb(30_000, 30_000))


@pytest.mark.parametrize(
    "content",
    [
        with_scans(80, size=(2000, 2000)),
        with_chunks(100_000, b"IDAT", b""),
        with_segments(100_000),
        with_comments(100_000),
        with_run_lengths(2000),
    ],
    ids=["scans", "chunks", "segments", "comments", "runs"],
)
def test_decoding_is_abandoned_after_its_time_limit(content, monkeypatch):
    """They take a fraction of a second; larger ones of each kind take minutes."""
    monkeypatch.setattr(decoding, "MAX_SECONDS", 0.01)
    with pytest.raises(decoding.PictureError, match=r"0\.01 s"):
        decode(content)


# ---- files


def test_only_regular_files_are_read(tmp_path):
    (tmp_path / "image.png").write_bytes(packed(PIXELS))
    read = decode(decoding.read(tmp_path / "image.png"), 32)
    np.testing.assert_array_equal(read, PIXELS)
    os.mkfifo(tmp_path / "pipe")
    devices = [tmp_path / "pipe", Path("/dev/zero")]
    for path in (*devices, tmp_path / "none.png", tmp_path, tmp_path / "a\0b"):
        with pytest.raises(decoding.PictureError, match="cannot be read"):
            decoding.read(path)
