"""Pictures are decoded in processes, which end whatever is in a picture."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from cifar10.input.pictures import decoding
from cifar10.tools.predict import decoder as decoders
from cifar10.tools.predict.decoder import Decoder, TooCostlyError
from small_folders import packed
from small_pictures import HALVES, PIXELS, bomb, with_profiles

# Some seven times as long as the decoders here give it.
LONG = with_profiles(1000)


@pytest.fixture
def decoder():
    return Decoder(seconds=0.2, max_pixels=10_000_000)


def decode(decoder, *contents):
    files = {f"image {number}": each for number, each in enumerate(contents)}
    return decoder.decode(files, (32, 32, 3))


def test_images_are_those_that_are_decoded_here(decoder):
    made = decode(decoder, packed(PIXELS), packed(HALVES))
    np.testing.assert_array_equal(made[0], PIXELS)
    np.testing.assert_array_equal(
        made[1], decoding.decode(packed(HALVES), "it", 32, 32)
    )
    with pytest.raises(decoding.PictureError, match="image 1 is damaged"):
        decode(decoder, packed(PIXELS), packed(PIXELS)[:100])


def test_what_takes_long_is_ended_and_what_follows_is_decoded(decoder):
    with pytest.raises(TooCostlyError, match=r"image 0 takes more than 0.3 s"):
        decode(decoder, LONG)
    np.testing.assert_array_equal(decode(decoder, packed(PIXELS))[0], PIXELS)


def children():
    return set(multiprocessing.active_children())


def test_an_image_does_not_wait_for_what_another_thread_decodes(decoder):
    def decode_in_vain():
        with pytest.raises(TooCostlyError, match="or crashes the decoder"):
            decode(decoder, packed(PIXELS))

    before = children()
    other = threading.Thread(target=decode_in_vain)
    other.start()
    while not (started := children() - before):
        time.sleep(0.01)
    (process,) = started
    os.kill(process.pid, signal.SIGSTOP)
    np.testing.assert_array_equal(decode(decoder, packed(PIXELS))[0], PIXELS)
    assert other.is_alive()
    process.kill()
    other.join()


def test_memory_is_limited(monkeypatch):
    monkeypatch.setattr(decoders, "_BYTES_PER_PIXEL", 4)
    monkeypatch.setattr(decoders, "_BYTES", 0)
    with pytest.raises(decoding.PictureError, match=r"image 0 .*MemoryError"):
        decode(Decoder(seconds=20, max_pixels=100_000_000), bomb(10_000, 10_000))


def test_a_signal_to_all_processes_leaves_the_last_answers(decoder):
    decode(decoder, packed(PIXELS))
    for process in children():
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGINT)
    np.testing.assert_array_equal(decode(decoder, packed(PIXELS))[0], PIXELS)


PARENT = """
import multiprocessing, sys
from cifar10.tools.predict.decoder import Decoder

decoder = Decoder(1000, 10_000)
decoder.decode({"it": sys.stdin.buffer.read()}, (32, 32, 3))
print(multiprocessing.active_children()[0].pid, flush=True)
sys.stdin.close()
multiprocessing.Event().wait()
"""


def test_it_ends_with_its_parent():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as parent:
        parent.stdin.write(packed(PIXELS))
        parent.stdin.close()
        child = int(parent.stdout.readline())
        parent.kill()
    for _ in range(1000):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.03)
    pytest.fail(f"process {child} outlives its parent")
