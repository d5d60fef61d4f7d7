"""Pictures of every kind to pixels, as training and predicting see them."""

import io
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cifar10.input.pictures import decoding
from small_folders import packed, pixels
from small_pictures import bomb, chunk, with_scans

RED, BLUE = (250, 10, 10), (10, 10, 250)


def decode(content, size=16, **options):
    return decoding.decode(content, "it", size, size, **options)


def halves(height, width, form="PNG", **options):
    """Returns the file of a picture with a red left and a blue right half."""
    image = np.full((height, width, 3), RED, np.uint8)
    image[:, width // 2 :] = BLUE
    return packed(image, form, **options)


@pytest.mark.parametrize("form", ["PNG", "BMP", "WEBP", "TIFF"])
def test_a_picture_of_the_right_size_is_itself_bit_for_bit(form):
    for size in (1, 16, 33):
        options = {"lossless": True} if form == "WEBP" else {}
        content = packed(pixels(1, size), form, **options)
        np.testing.assert_array_equal(decode(content, size), pixels(1, size))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_the_shorter_side_is_resized_and_the_centre_cut(form):
    image = decode(halves(100, 300, form)).astype(int)
    assert image.shape == (16, 16, 3)
    assert np.abs(image[:, :7] - RED).max() < 20
    assert np.abs(image[:, 9:] - BLUE).max() < 20
    # What is left of the centre is not in it.
    wide = np.zeros((100, 300, 3), np.uint8)
    wide[:, 101:199] = 255
    assert decode(packed(wide)).min() > 200


@pytest.mark.parametrize("size", [16, 64])
def test_a_jpeg_file_is_decoded_small_without_loss_of_quality(size, monkeypatch):
    smooth = Image.fromarray(pixels(3, 6)).resize((1200, 900), Image.Resampling.BICUBIC)
    content = packed(smooth, "JPEG", quality=95)
    small = decode(content, size).astype(int)
    monkeypatch.setattr(decoding, "_DRAFT", 1_000_000)
    whole = decode(content, size).astype(int)
    assert np.abs(small - whole).mean() < 1.5
    assert np.abs(small - whole).max() <= 6
    assert not np.array_equal(small, whole), "it was decoded small"


def test_a_file_whose_size_is_not_known_is_read_whole():
    path = Path("/proc/self/maps")
    assert path.stat().st_size == 0
    assert decoding.read(path).endswith(b"\n")


def test_a_large_jpeg_file_takes_little_memory():
    content = packed(Image.new("RGB", (6000, 6000), RED), "JPEG")
    image = Image.open(io.BytesIO(content))
    tracemalloc.start()
    decode(content)
    assert tracemalloc.get_traced_memory()[1] < image.width * image.height
    tracemalloc.stop()


def test_of_an_animation_it_is_the_first_frame():
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, BLUE, BLUE)]
    for form in ("GIF", "WEBP", "PNG", "TIFF"):
        content = packed(frames[0], form, save_all=True, append_images=frames[1:])
        image = decode(content).astype(int)
        assert np.abs(image - RED).max() < 20


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (packed(Image.new("CMYK", (20, 20), (0, 255, 255, 0)), "JPEG"), (255, 0, 0)),
        (packed(np.full((20, 20), 0xC8FF, np.uint16)), (200, 200, 200)),
        (packed(Image.new("LA", (20, 20), (100, 255))), (100, 100, 100)),
        (packed(Image.new("LA", (20, 20), (100, 0))), (255, 255, 255)),
        (packed(Image.new("RGBA", (20, 20), (9, 9, 9, 0)), "WEBP"), (255, 255, 255)),
        (packed(Image.new("1", (20, 20), 1), "BMP"), (255, 255, 255)),
        (packed(Image.new("L", (20, 20), 77), "GIF"), (77, 77, 77)),
        (packed(Image.new("P", (20, 20), 1), "GIF", transparency=1), (255, 255, 255)),
    ],
)
def test_every_mode_becomes_red_green_and_blue(content, expected):
    image = decode(content).astype(int)
    assert np.abs(image - expected).max() <= 3


def test_sixteen_bits_of_colour_become_eight():
    rows = b"".join(b"\0" + bytes([200, 1, 100, 2, 50, 3]) * 16 for _ in range(16))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 16, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    image = decode(b"\x89PNG\r\n\x1a\n" + head + body)
    assert (image == (200, 100, 50)).all()


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "PNG", "TIFF"])
def test_a_camera_held_upside_down_is_turned(form):
    exif = Image.Exif()
    exif[0x0112] = 3
    image = decode(halves(40, 40, form, exif=exif)).astype(int)
    assert np.abs(image[:, :7] - BLUE).max() < 20
    assert np.abs(image[:, 9:] - RED).max() < 20


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            b"",
            "it is neither a PNG nor a JPEG nor a WebP nor a BMP nor a GIF nor a TIFF",
        ),
        (b"II*\0" + bytes(100), "it is damaged: "),
        (b"MM\0*" + bytes(2), "it is damaged: it ends too early."),
        (packed(pixels(1), "TIFF")[:-40], "it is damaged: "),
        (packed(Image.new("F", (9, 9)), "TIFF"), "it has 32 bits a channel; save it"),
        (packed(Image.new("I", (9, 9)), "TIFF"), "it has 32 bits a channel; save it"),
        (b"GIF89a" + bytes(5), "it is damaged: "),
        (b"RIFF\0\0\0\0WEBP" + bytes(50), "it is damaged: "),
        (b"BM" + bytes(60), "it is damaged: "),
        (packed(pixels(1), "WEBP")[:-40], "it is damaged: "),
        (bomb(20_000, 20_000), "it has 20,000 x 20,000 pixels; at most 50,000,000 are"),
    ],
)
def test_what_is_no_good_picture_is_a_sentence(content, why):
    with pytest.raises(decoding.PictureError) as caught:
        decode(content)
    assert str(caught.value).startswith(why)


def test_a_real_picture_of_very_many_pixels_is_refused_before_it_is_decoded():
    content = packed(Image.new("1", (20_000, 20_000)))
    with pytest.raises(decoding.PictureError, match="20,000 x 20,000 pixels"):
        decode(content)


@pytest.mark.parametrize("how", ["raw", "tiff_lzw", "tiff_deflate", "packbits"])
def test_a_tiff_file_is_read_however_it_is_compressed(how):
    content = packed(pixels(1, 16), "TIFF", compression=how)
    np.testing.assert_array_equal(decode(content), pixels(1, 16))


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
)
def test_a_tiff_file_of_very_many_parts_is_refused(content, monkeypatch):
    tiff_alone = {"TIFF": (decoding._KINDS["TIFF"][0], None)}
    monkeypatch.setattr(decoding, "_KINDS", tiff_alone)
    monkeypatch.setattr(decoding, "KINDS", ("TIFF",))
    with pytest.raises(decoding.PictureError, match="far more parts than it needs"):
        decode(content)


def test_many_scans_of_a_large_picture_are_refused_before_they_are_decoded(monkeypatch):
    """Each scan takes as long as a picture of its size: 90 of them half a minute."""
    assert decode(with_scans(80)).shape == (16, 16, 3)
    content = with_scans(80, size=(3000, 3000))
    monkeypatch.setattr(decoding, "_fitted", None)
    with pytest.raises(decoding.PictureError, match="far more parts than it needs"):
        decode(content)
