"""Images from files: any kind becomes the model's input, or a sentence."""

import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from cifar10.errors import UsageError
from cifar10.input.pictures import decoding
from cifar10.tools.predict import pictures
from small_folders import packed
from small_pictures import (
    HALVES,
    PIXELS,
    bomb,
    with_chunks,
    with_scans,
    with_segments,
)

RANDOM = np.random.default_rng(0)


def decode(content):
    return decoding.decode(content, "it", 32, 32)


def test_an_image_of_the_right_size_stays_as_it_is(tmp_path):
    np.testing.assert_array_equal(decode(packed(PIXELS)), PIXELS)
    (tmp_path / "image.png").write_bytes(packed(PIXELS))
    read = decode(decoding.read(tmp_path / "image.png"))
    np.testing.assert_array_equal(read, PIXELS)
    assert read.dtype == np.uint8


def test_a_smaller_image_is_an_average_and_not_a_selection():
    board = (np.indices((320, 320)).sum(0) % 2 * 255).astype(np.uint8)
    small = decode(packed(board))
    assert 120 <= small.min() <= small.max() <= 135


@pytest.mark.parametrize("size", [(96, 96), (32, 96), (1, 1), (3, 500), (7, 5)])
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_any_size_comes_out_as_the_model_takes_it(size, form):
    colour = np.full((*size, 3), (200, 100, 50), np.uint8)
    made = decode(packed(colour, form)).astype(int)
    assert made.shape == (32, 32, 3)
    assert np.abs(made - (200, 100, 50)).max() <= 3


def test_the_centre_keeps_its_proportions():
    wide = np.zeros((40, 120, 3), np.uint8)
    wide[:, 40:80] = 255
    assert decode(packed(wide)).min() > 240  # Black begins right beside it.


def test_a_camera_held_sideways_is_turned_back():
    sideways = np.rot90(HALVES, axes=(1, 0))  # The left half is above now.
    exif = Image.Exif()
    exif[0x0112] = 8
    for form in ("PNG", "JPEG"):
        made = decode(packed(sideways, form, exif=exif)).astype(int)
        assert (made[:, :14, 0] > 200).all()
        assert (made[:, 18:, 2] > 200).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_undone(orientation):
    """Compared with what Pillow makes of the whole image."""
    random = np.random.default_rng(orientation)
    tall = random.integers(0, 256, (90, 60, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = packed(tall, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    made = decoding.decode(content, "it", 20, 32).astype(int)
    expected = decoding.decode(packed(np.asarray(upright)), "it", 20, 32)
    assert np.abs(made - expected).max() <= 1


def exif_of(tag, kind, value):
    """EXIF data with an orientation and another entry of any kind."""
    entries = struct.pack("<HHHII", 2, 0x0112, 3, 1, 6)
    entries += struct.pack("<HHI4sI", tag, kind, 1, value, 0)
    return b"Exif\0\0II*\0" + struct.pack("<I", 8) + entries


@pytest.mark.parametrize("kind", range(14))
def test_an_image_with_odd_data_beside_it_is_an_image(kind):
    exif = exif_of(271, kind, struct.pack("<I", 8))
    for form in ("PNG", "JPEG"):
        assert decode(packed(PIXELS, form, exif=exif)).shape == (32, 32, 3)


def grey(value):
    return Image.fromarray(np.full((32, 32), value, np.uint8))


def palette(colour, **options):
    image = Image.new("P", (32, 32), 1)
    image.putpalette([0, 0, 0, *colour])
    return packed(image, **options)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (packed(grey(77)), (77, 77, 77)),
        (packed(grey(77).convert("RGBA")), (77, 77, 77)),
        (packed(Image.new("RGBA", (32, 32), (9, 9, 9, 0))), (255, 255, 255)),
        (packed(Image.new("RGBA", (32, 32), (0, 0, 0, 51))), (204, 204, 204)),
        (packed(Image.new("LA", (32, 32), (0, 51))), (204, 204, 204)),
        (palette((10, 20, 30)), (10, 20, 30)),
        (palette((10, 20, 30), transparency=1), (255, 255, 255)),
        (packed(Image.new("1", (32, 32), 1)), (255, 255, 255)),
        (packed(np.full((32, 32), 0x4D31, np.uint16)), (77, 77, 77)),
        (packed(Image.new("CMYK", (32, 32)), "JPEG"), (255, 255, 255)),
        (packed(grey(77), "JPEG"), (77, 77, 77)),
    ],
)
def test_every_mode_becomes_red_green_and_blue(content, expected):
    made = decode(content)
    np.testing.assert_array_equal(made, np.broadcast_to(expected, (32, 32, 3)))


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
def test_an_image_may_have_many_parts(content):
    assert decode(content).shape == (32, 32, 3)


@pytest.mark.parametrize(
    "content",
    [
        with_scans(decoding.MAX_SCANS),
        with_chunks(300_000),
        with_chunks(decoding.MAX_PARTS, b"IDAT", b""),
        with_segments(decoding.MAX_PARTS),
    ],
)
def test_an_image_of_very_many_parts_is_refused_before_it_is_decoded(
    content, monkeypatch
):
    monkeypatch.setattr(decoding, "_fitted", None)
    with pytest.raises(decoding.PictureError, match="it has far more parts than it"):
        decode(content)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "neither a PNG nor a JPEG"),
        (b"GIF89a" + bytes(100), "is damaged"),
        (b"<html>not found</html>", "neither a PNG nor a JPEG"),
        (packed(PIXELS)[:40], "is damaged"),
        (packed(PIXELS)[:-200], "is damaged"),
        (packed(PIXELS, "JPEG")[:300], "is damaged"),
        (packed(PIXELS, "JPEG")[:-100], "is damaged"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "is damaged"),
        (b"\xff\xd8\xff" + bytes(50), "is damaged"),
        (bomb(0, 10), "is damaged"),
        (bomb(100, 100), "is damaged"),
        (bomb(30_000, 30_000), "30,000 x 30,000 pixels; at most"),
        (bomb(2**31 - 1, 2**31 - 1), "pixels; at most"),
        (packed(PIXELS) + bytes(decoding.MAX_BYTES), "more than 50,000,000 bytes"),
    ],
)
def test_what_is_no_good_image_is_a_sentence(content, why):
    with pytest.raises(decoding.PictureError, match=why) as caught:
        decode(content)
    assert str(caught.value).startswith("it ")
    assert str(caught.value).endswith(".")


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of odd EXIF data.
def test_whatever_is_done_to_a_file_is_an_image_or_a_sentence():
    whole = [
        packed(PIXELS),
        packed(PIXELS, "JPEG"),
        palette((1, 2, 3), transparency=1),
        packed(np.full((9, 9), 9, np.uint16)),
        packed(PIXELS, exif=exif_of(271, 11, bytes(4))),
        packed(PIXELS, "JPEG", exif=exif_of(271, 5, struct.pack("<I", 8))),
    ]
    refused = 0
    for number in range(1500):
        content = bytearray(whole[number % len(whole)])
        for place in RANDOM.integers(0, len(content), 1 + number % 4):
            content[place] = RANDOM.integers(0, 256)
        try:
            assert decode(bytes(content)).shape == (32, 32, 3)
        except decoding.PictureError:
            refused += 1
    assert 100 < refused < 1500


def test_folders_stand_for_the_files_in_them_and_a_dash_for_a_list(tmp_path):
    for name in ("b.png", "a.jpg", "deep/c.txt", ".hidden", ".git/d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    listed = io.StringIO("x.png\n\ny z.png\n")
    found = pictures.find([str(tmp_path), "none.png", "-"], listed)
    inside = [tmp_path / name for name in ("a.jpg", "b.png", "deep/c.txt")]
    assert found == [*inside, Path("none.png"), Path("x.png"), Path("y z.png")]


def test_what_is_no_file_on_a_disk_is_left_out_and_what_is_not_there_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")  # It would be waited for without an end.
    (tmp_path / "gone.png").symlink_to("nowhere")
    assert pictures.find([str(tmp_path)], ()) == [tmp_path / "gone.png"]


def test_names_that_cannot_be_looked_at_are_left_to_the_reading():
    for name in ("a" * 5000, "a\0b"):
        (found,) = pictures.find([name], ())
        with pytest.raises(decoding.PictureError, match="cannot be read"):
            decoding.read(found)


def test_nothing_to_read_is_said(tmp_path):
    with pytest.raises(UsageError, match=f"no files in {tmp_path}"):
        pictures.find([str(tmp_path)], io.StringIO())
    with pytest.raises(UsageError, match="no files in standard input"):
        pictures.find(["-"], io.StringIO("\n"))


def test_files_that_cannot_be_read_are_sentences(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, why in [
        (tmp_path / "none.png", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "a\0b", "cannot be read"),
        (tmp_path / "pipe", "a pipe or a device"),
        (Path("/dev/zero"), "a pipe or a device"),
    ]:
        before = len([*Path("/dev/fd").iterdir()])
        with pytest.raises(decoding.PictureError, match=why):
            decoding.read(path)
        assert len([*Path("/dev/fd").iterdir()]) == before, "it is closed again"
