"""Reads the Python version of CIFAR, whose files are pickles, without unpickling them.

Unpickling may run any code, and take any time and memory. Here only the list of opcodes
is read: the integers that follow the name of the labels, and the bytes of the images.
Nothing else is built. A file with opcodes or names that no batch needs is refused.
"""

import pickletools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cifar10 import files
from cifar10.errors import UsageError

# Python 3 may write CIFAR-100's training images in 230 MB, and 12 opcodes each.
_MOST_BYTES = 300_000_000
_MOST_OPCODES = 20
_PIXELS = 3072
# The opcodes of pickles of lists, dictionaries, numbers, texts and arrays.
_TEXTS = {
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "BINBYTES"),
    *("SHORT_BINUNICODE", "SHORT_BINBYTES", "BINUNICODE8", "BINBYTES8", "BYTEARRAY8"),
}
_NUMBERS = {"INT", "LONG", "LONG1", "BININT", "BININT1", "BININT2"}
_OTHERS = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "REDUCE", "BUILD", "DICT"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "LIST", "EMPTY_LIST"),
    *("APPEND", "APPENDS", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE"),
    *("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
}
_NAMES = (
    *("numpy.core.multiarray _reconstruct", "numpy.core.numeric _frombuffer"),
    *("numpy ndarray", "numpy dtype", "_codecs encode"),
)
_LONGEST_KEY = 20


class _RefusedError(ValueError):
    """The file may be harmful, or is no batch."""


def read_records(path: Path, label_keys: Sequence[str], count: int) -> np.ndarray:
    """Reads a pickled batch as the records of a binary file.

    Args:
        path: The file.
        label_keys: The names of the labels in the batch; a record has a byte for each.
        count: Number of images in the batch.

    Returns:
        uint8 [count, len(label_keys) + 3072]; see `records.py`.

    Raises:
        UsageError: The file has other content.
    """
    try:
        return _records(files.read(path, _MOST_BYTES, follow=True), label_keys, count)
    except ValueError as error:
        problem = error if isinstance(error, _RefusedError) else "its pickle is damaged"
        why = f"{path} is not a pickled batch of CIFAR: {problem}"
        raise UsageError(f"{why}. Replace it, or move its folder away.") from error


def _records(content: bytes, label_keys: Sequence[str], count: int) -> np.ndarray:
    """Finds the labels, which follow their key's text, and the images."""
    scan = _Scan(count * _PIXELS)
    for number, (opcode, value, _) in enumerate(pickletools.genops(content)):
        if number > _MOST_OPCODES * (count + 100):
            raise _RefusedError("its pickle is too long")
        scan.see(opcode.name, value)
    labels = [np.array(scan.numbers[key]) for key in label_keys]
    shapes = {each.shape for each in labels}
    if not scan.pixels or "u1" not in scan.texts or shapes != {(count,)}:
        raise _RefusedError(f"it does not hold {count:,} uint8 images and labels")
    others = [scan.numbers[key] for key in scan.numbers.keys() - {*label_keys}]
    runs = (some[at:] for some in others for at in range(len(some)))
    possible = [[count, _PIXELS], [count, 3, 32, 32]][: 1 if scan.is_by_column else 2]
    if not any(some[: len(shape)] == shape for some in runs for shape in possible):
        expected = f"[{count}, {_PIXELS}], colour by colour"
        raise _RefusedError(f"its images are not {expected}")
    if any(each.min() < 0 or each.max() > np.iinfo(np.uint8).max for each in labels):
        raise _RefusedError("its labels do not fit in bytes")
    columns = [each.astype(np.uint8)[:, np.newaxis] for each in labels]
    order: Any = "F" if scan.is_by_column else "C"
    rows = np.frombuffer(scan.pixels, np.uint8).reshape((count, _PIXELS), order=order)
    return np.concatenate([*columns, rows], axis=1)


class _Scan:
    """The content of a pickle as far as it is read; the images have `size` bytes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._key = self._last = ""  # The newest text, as a key and in all.
        self._flag = False  # The newest truth value.
        self.numbers = defaultdict[str, list[int]](list)  # By the text before them.
        self.texts: set[str] = set()
        self.pixels, self.is_by_column = b"", False

    def see(self, kind: str, value: Any) -> None:
        """Takes an opcode and its argument; refuses those that no batch needs."""
        if kind in _TEXTS:
            self._see_text(value if isinstance(value, str) else value.decode("latin-1"))
        elif kind in _NUMBERS and not isinstance(value, bool):
            self.numbers[self._key].append(value)
        elif kind in ("NEWTRUE", "NEWFALSE", "INT"):
            self._flag = kind == "NEWTRUE" or value is True
        elif kind == "STACK_GLOBAL":  # Its module may be any text before.
            if self._last not in {name.partition(" ")[2] for name in _NAMES}:
                raise _RefusedError(f"its pickle asks for {self._last[:100]}")
        elif kind == "GLOBAL":
            if value.replace("numpy._core.", "numpy.core.") not in _NAMES:
                raise _RefusedError(f"its pickle asks for {value[:100]}")
        elif kind not in _OTHERS:
            raise _RefusedError(f"its pickle has the opcode {kind}")

    def _see_text(self, text: str) -> None:
        self._last = text
        if len(text) == self._size:
            self.pixels = text.encode("latin-1")
            self.is_by_column = self._flag  # As NumPy writes it before the bytes,
        elif len(text) <= _LONGEST_KEY:
            self.texts.add(text)
            self.is_by_column |= text == "F"  # or after them, in protocol 5.
            if text != "latin1":  # Python 3 writes it after the bytes of a text.
                self._key = text
