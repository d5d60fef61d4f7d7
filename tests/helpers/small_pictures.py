"""Helpers: files of pictures, among them hostile ones."""

import struct
import zlib

import numpy as np
from PIL import Image

from small_folders import packed

PIXELS = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
# Left half red, right half blue.
HALVES = np.zeros((96, 96, 3), np.uint8)
HALVES[:, :48, 0] = 255
HALVES[:, 48:, 2] = 255


def chunk(name, content):
    sum_ = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + sum_


def bomb(width, height):
    """Returns a PNG file of a few bytes that claims many pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1000))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head)
    return start + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def with_scans(more, size=(64, 64)):
    """Returns a progressive JPEG file with additional scans, which change nothing."""
    content = packed(Image.new("RGB", size), "JPEG", progressive=True)
    scan = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + more * scan + content[-2:]


def with_chunks(more, name=b"tEXt", content=b"a\0b"):
    """Returns a PNG file with additional chunks."""
    start, rest = packed(PIXELS)[:33], packed(PIXELS)[33:]
    return start + more * chunk(name, content) + rest


def with_profiles(more):
    """Returns a PNG file with colour profiles; Pillow needs 2 ms for each."""
    return with_chunks(more, b"iCCP", b"a\0\0" + zlib.compress(bytes(2**20)))


def with_segments(more, segment=b"\xff\xfe\0\2"):
    """Returns a JPEG file with additional segments."""
    return b"\xff\xd8" + more * segment + packed(PIXELS, "JPEG")[2:]
