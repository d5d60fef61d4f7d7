"""One file of each kind that public suites hold, against what it has to show."""

import numpy as np
import pytest

import picture_files
from cifar10.input.pictures import decoding
from picture_files import as_pillow_shows, other_files, png_files, with_metadata


def shown(content, height, width):
    return decoding.decode(content, "it", height, width).astype(int)


def as_cases(files):
    return [pytest.param(*rest, id=name) for name, *rest in files]


@pytest.mark.parametrize(("content", "expected"), as_cases(png_files()))
def test_a_png_file_shows_its_values_on_white(content, expected):
    found = shown(content, *expected.shape[:2])
    assert np.abs(found - expected).max() <= 1


@pytest.mark.parametrize("content", as_cases(other_files()))
def test_a_decoded_file_equals_pillows_picture_upright_and_on_white(content):
    expected = as_pillow_shows(content).astype(int)
    found = shown(content, *expected.shape[:2])
    assert np.abs(found - expected).max() <= 1


@pytest.mark.parametrize(("content", "plain"), as_cases(with_metadata()))
def test_metadata_do_not_affect_the_pixels(content, plain):
    size = picture_files.HEIGHT, picture_files.WIDTH
    np.testing.assert_array_equal(shown(content, *size), shown(plain, *size))


@pytest.mark.parametrize(
    "content", as_cases(one for one in other_files() if "animated" not in one[0])
)
def test_a_truncated_file_is_refused(content):
    with pytest.raises(decoding.PictureError):
        shown(content[: len(content) // 2], 8, 8)


def test_an_orientation_beside_broken_metadata_is_kept():
    turned = dict(other_files())
    for name, at in (("PNG, orientation 6", 33), ("JPEG, orientation 6", 2)):
        content = turned[name]
        broken = picture_files.segment(0xED, b"Photoshop 3.0\x008BIM\3\xed")
        if at == 33:
            broken = picture_files.chunk(b"iCCP", b"a\0\7")
        expected = shown(content, 13, 11)
        found = shown(content[:at] + broken + content[at:], 13, 11)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", picture_files.ARITHMETIC)
def test_arithmetic_coding_is_read_at_once(kind, monkeypatch):
    """Other files are read in pieces, for which libjpeg would have to stop within."""
    content = dict(other_files())[f"JPEG, arithmetic, {kind}"]
    monkeypatch.setattr(decoding, "_READ_BYTES", 100)
    found = shown(content, 16, 16)
    assert np.abs(found - as_pillow_shows(content).astype(int)).max() == 0


def test_arithmetic_coding_with_very_many_scans_is_refused():
    content = dict(other_files())["JPEG, arithmetic, progressive"]
    size = content.index(b"\xff\xca") + 5
    large = content[:size] + b"\x1b\x58\x1b\x58" + content[size + 4 :]  # 49 megapixels.
    scans = b"\xff\xda\0\2" * 30
    with pytest.raises(decoding.PictureError, match="too long"):
        shown(large[:-2] + scans + large[-2:], 8, 8)


def test_the_command_compares_a_folder_with_pillow(tmp_path, capsys):
    """The command that compares any folder with Pillow."""
    names = ("JPEG, RGB, {}", "WebP, []", "PNG, orientation 6")
    for number, name in enumerate(names):
        (tmp_path / f"{number}.png").write_bytes(dict(other_files())[name])
    (tmp_path / "damaged.png").write_bytes(b"no picture")
    wrong = next(
        c for n, c, _ in png_files() if n.startswith("colour 0, 16") and "clear=1" in n
    )
    (tmp_path / "pillow is wrong.png").write_bytes(wrong)
    picture_files.main(tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "4 pictures of the kinds that are read, 1 differ"
    assert "pillow is wrong" in said[0]
