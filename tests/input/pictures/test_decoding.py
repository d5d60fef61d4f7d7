"""Pictures of every kind to pixels, as training and predicting see them."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

from cifar10.errors import UsageError
from cifar10.input.pictures import decoding
from cifar10.tools.predict import pictures
from small_folders import packed, pixels
from small_pictures import (
    HALVES,
    PIXELS,
    bomb,
    chunk,
    with_chunks,
    with_scans,
    with_segments,
)

KINDS = ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"]
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
    for size in [(1, 1), (3, 500)]:
        colour = np.full((*size, 3), (200, 100, 50), np.uint8)
        made = decode(packed(colour, form)).astype(int)
        assert np.abs(made - (200, 100, 50)).max() <= (60 if form == "GIF" else 5)


@pytest.mark.parametrize("form", ["PNG", "BMP", "WEBP", "TIFF"])
def test_a_picture_of_the_right_size_is_itself_bit_for_bit(form):
    for size in (1, 16, 33):
        options = {"lossless": True} if form == "WEBP" else {}
        content = packed(pixels(1, size), form, **options)
        np.testing.assert_array_equal(decode(content, size), pixels(1, size))
    for how in ("tiff_lzw", "tiff_deflate", "packbits") if form == "TIFF" else ():
        content = packed(pixels(1, 16), "TIFF", compression=how)
        np.testing.assert_array_equal(decode(content), pixels(1, 16))


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
    for form in ("GIF", "WEBP", "PNG", "TIFF"):
        content = packed(frames[0], form, save_all=True, append_images=frames[1:])
        assert np.abs(decode(content).astype(int) - RED).max() < 20


def palette(colour, **options):
    image = Image.new("P", (20, 20), 1)
    image.putpalette([0, 0, 0, *colour])
    return packed(image, **options)


def sixteen_bits():
    """Returns a PNG file with 16 bits a channel, which Pillow does not write."""
    rows = b"".join(b"\0" + bytes([200, 1, 100, 2, 50, 3]) * 16 for _ in range(16))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 16, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + body


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (packed(Image.new("L", (20, 20), 77), "GIF"), (77, 77, 77)),
        (packed(Image.new("LA", (20, 20), (0, 51))), (204, 204, 204)),
        (packed(Image.new("RGBA", (20, 20), (9, 9, 9, 0)), "WEBP"), (255, 255, 255)),
        (packed(Image.new("RGBA", (20, 20), (0, 0, 0, 51))), (204, 204, 204)),
        (palette((10, 20, 30), transparency=1), (255, 255, 255)),
        (packed(Image.new("1", (20, 20), 1), "BMP"), (255, 255, 255)),
        (packed(np.full((20, 20), 0xC8FF, np.uint16)), (200, 200, 200)),
        (packed(Image.new("CMYK", (20, 20), (0, 255, 255, 0)), "JPEG"), (255, 0, 0)),
        (sixteen_bits(), (200, 100, 50)),
    ],
)
def test_every_mode_becomes_red_green_and_blue(content, expected):
    assert np.abs(decode(content).astype(int) - expected).max() <= 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_undone(orientation):
    """Compared with what Pillow makes of the whole image."""
    tall = np.random.default_rng(orientation).integers(0, 256, (90, 60, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for form in ("PNG", "JPEG", "WEBP", "TIFF"):
        content = packed(tall, form, exif=exif)
        upright = packed(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
        made = decoding.decode(content, "it", 20, 32).astype(int)
        expected = decoding.decode(upright, "it", 20, 32)
        assert np.abs(made - expected).max() <= 1


def exif_of(tag, kind, value):
    """Returns EXIF data with an orientation and another entry of any kind."""
    entries = struct.pack("<HHHII", 2, 0x0112, 3, 1, 6)
    entries += struct.pack("<HHI4sI", tag, kind, 1, value, 0)
    return b"Exif\0\0II*\0" + struct.pack("<I", 8) + entries


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of such data.
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_malformed_data_beside_an_image_are_ignored(form):
    for kind in range(14):
        exif = exif_of(271, kind, struct.pack("<I", 8))
        assert decode(packed(PIXELS, form, exif=exif)).shape == (16, 16, 3)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "neither"),
        (packed(PIXELS)[:-200], "damaged"),
        (packed(PIXELS, "JPEG")[:-100], "damaged"),
        (packed(PIXELS, "TIFF")[:-40], "damaged"),
        (b"GIF89a" + bytes(5), "damaged"),
        (b"MM\0*" + bytes(2), "early"),
        (bomb(0, 10), "damaged"),
        (packed(Image.new("F", (9, 9)), "TIFF"), "32 bits"),
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
        with_segments(1000),
        # A small image beside the image, and a film after it, have their own scans.
        with_segments(1, b"\xff\xe1\1\xff" + b"\xff\xda" * 255 + b"."),
        packed(PIXELS, "JPEG") + b"\xff\xda" * 30_000,
    ],
)
def test_a_picture_may_have_many_parts(content):
    assert decode(content).shape == (16, 16, 3)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (bomb(30_000, 30_000), "30,000 x 30,000"),
        (bomb(2**31 - 1, 2**31 - 1), "pixels"),
        (with_scans(decoding.MAX_SCANS), "parts"),
        # Each scan takes as long as a picture of its size: these half a minute.
        (with_scans(80, size=(3000, 3000)), "parts"),
        (with_chunks(decoding.MAX_PARTS, b"IDAT", b""), "parts"),
        (with_segments(decoding.MAX_PARTS), "parts"),
    ],
    ids=["pixels", "more pixels", "scans", "large scans", "chunks", "segments"],
)
def test_very_many_parts_or_pixels_are_refused_before_they_are_decoded(
    content, named, monkeypatch
):
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    with pytest.raises(decoding.PictureError, match=named):
        decode(content)


def tiff(*entries, more=b""):
    """Returns a TIFF file of entries: tag, type, count and value or place."""
    size = [(256, 3, 1, 4000), (257, 3, 1, 4000), (258, 3, 1, 8), (262, 3, 1, 1)]
    rows = b"".join(struct.pack("<HHLL", *entry) for entry in (*size, *entries))
    head = struct.pack("<2sHLH", b"II", 42, 8, len(size) + len(entries))
    return head + rows + bytes(4) + more


@pytest.mark.parametrize(
    "content",
    [
        # A strip for each byte, and values that are the whole file again and again.
        tiff((273, 4, 500_000, 200), (279, 4, 500_000, 200), more=bytes(2_000_200)),
        tiff(*[(40_000 + n, 1, 90_000, 9) for n in range(500)], more=bytes(90_000)),
        # Tiles of which next to nothing is within the image.
        tiff((322, 3, 1, 16), (323, 4, 1, 2**24), (324, 4, 999, 9), more=bytes(4_000)),
    ],
    ids=["strips", "values", "tiles"],
)
def test_a_tiff_file_of_very_many_parts_is_refused_before_it_is_read(
    content, monkeypatch
):
    monkeypatch.setattr(TiffImageFile, "__init__", None)
    with pytest.raises(decoding.PictureError, match="parts"):
        decode(content)


# ---- files


def test_files_are_read_and_closed(tmp_path):
    (tmp_path / "image.png").write_bytes(packed(PIXELS))
    read = decode(decoding.read(tmp_path / "image.png"), 32)
    np.testing.assert_array_equal(read, PIXELS)
    # One whose size is not known.
    assert decoding.read(Path("/proc/self/maps")).endswith(b"\n")
    os.mkfifo(tmp_path / "pipe")
    devices = [tmp_path / "pipe", Path("/dev/zero")]
    names = [tmp_path / "none.png", tmp_path, tmp_path / "a\0b", Path("a" * 5000)]
    for path in (*devices, *names):
        before = len([*Path("/dev/fd").iterdir()])
        with pytest.raises(decoding.UnreadableError):
            decoding.read(path)
        assert len([*Path("/dev/fd").iterdir()]) == before


def test_folders_stand_for_the_files_in_them_and_a_dash_for_a_list(tmp_path):
    for name in ("b.png", "a.jpg", "deep/c.txt", ".hidden", ".git/d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "pipe.png")  # It would be waited for without an end.
    (tmp_path / "gone.png").symlink_to("nowhere")
    listed = io.StringIO("x.png\n\ny z.png\n")
    found = pictures.find([str(tmp_path), "a\0b", "-"], listed)
    inside = [tmp_path / name for name in ("a.jpg", "b.png", "deep/c.txt", "gone.png")]
    assert sorted(found[:4]) == inside
    assert found[4:] == [Path("a\0b"), Path("x.png"), Path("y z.png")]


def test_no_files_at_all_are_refused(tmp_path):
    for given in (str(tmp_path), "-"):
        with pytest.raises(UsageError, match="no files"):
            pictures.find([given], io.StringIO("\n"))
