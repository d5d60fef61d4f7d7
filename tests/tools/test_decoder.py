"""Pictures are decoded in processes, which end whatever is in a picture."""

import multiprocessing
import os
import resource
import signal
import time

import numpy as np
import pytest
from PIL import Image

import runs
from cifar10.input.pictures import decoding
from cifar10.tools.classification import Decoder
from small_folders import packed
from small_pictures import HALVES, PIXELS, with_profiles

PARENT = """
import multiprocessing, sys
from pathlib import Path
from cifar10.tools.classification import Decoder

decoder = Decoder(1000, 10_000)
decoder.decode(Path(sys.argv[1]).read_bytes(), "it", (32, 32, 3))
print(multiprocessing.active_children()[0].pid, flush=True)
multiprocessing.Event().wait()
"""


@pytest.fixture
def decoder():
    return Decoder(seconds=0.2, max_pixels=10_000_000)


def decode(decoder, content, channels=3):
    return decoder.decode(content, "it.png", (32, 32, channels))


def test_damaged_metadata_cause_no_output(decoder, capfd):
    """As with EXIF data that end within their directory of entries."""
    exif = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01"
    for form in ("JPEG", "PNG", "WEBP"):
        decode(decoder, packed(PIXELS, form, exif=exif))
    assert capfd.readouterr() == ("", "")


def children():
    return set(multiprocessing.active_children())


def test_images_equal_the_images_decoded_here(decoder):
    before = children()
    np.testing.assert_array_equal(decode(decoder, packed(PIXELS)), PIXELS)
    expected = decoding.decode(packed(HALVES), "it", 32, 32)
    np.testing.assert_array_equal(decode(decoder, packed(HALVES)), expected)
    brightness = decode(decoder, packed(PIXELS), channels=1)[:, :, 0]
    np.testing.assert_array_equal(brightness, Image.fromarray(PIXELS).convert("L"))
    with pytest.raises(decoding.PictureError, match=r"it\.png"):
        decode(decoder, packed(PIXELS)[:100])

    (process,) = children() - before
    memory, _ = resource.prlimit(process.pid, resource.RLIMIT_DATA)
    assert 10_000_000 < memory < 2e9
    # A signal to all processes leaves the last answers.
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGINT)
    np.testing.assert_array_equal(decode(decoder, packed(PIXELS)), PIXELS)
    assert process.is_alive()


def test_a_slow_image_is_abandoned_and_the_next_is_decoded(decoder):
    with pytest.raises(decoding.PictureError, match=r"it\.png takes more than"):
        decode(decoder, with_profiles(1000))  # Some seven times as long as it may.
    np.testing.assert_array_equal(decode(decoder, packed(PIXELS)), PIXELS)


@pytest.mark.slow
def test_decoder_ends_with_its_parent(tmp_path):
    (tmp_path / "it.png").write_bytes(packed(PIXELS))
    with runs.started("-c", PARENT, tmp_path / "it.png") as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    for _ in range(1000):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.03)
    pytest.fail(f"process {child} outlives its parent")
