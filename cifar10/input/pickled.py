"""Reads the Python version of CIFAR, whose files are pickles.

Unpickling may run any code. Here a pickle builds nothing but numbers, texts, lists,
dictionaries, and stand-ins that keep the parts of an array. One that asks for anything
else is refused.
"""

import io
import pickle
import pickletools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cifar10.errors import UsageError
from cifar10.process import files

# CIFAR-100's training images take 156 MB. Python 3 writes up to 12 opcodes an image.
_MOST_BYTES = 200_000_000
_MOST_OPCODES = 20
_PIXELS = 3072


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
    content = files.read(path, _MOST_BYTES, follow=True)
    try:
        return _records(content, label_keys, count)
    except (
        *(pickle.UnpicklingError, ValueError, LookupError, TypeError),
        *(AttributeError, EOFError, OverflowError),
    ) as error:
        reason = error if isinstance(error, _RefusedError) else type(error).__name__
        raise UsageError(
            f"{path} is not a pickled batch of CIFAR: {reason}.\nPut the right file "
            "there, or move its folder away."
        ) from error


class _RefusedError(ValueError):
    """A pickle that may be harmful, or is no batch, for a reason to tell."""


def _records(content: bytes, label_keys: Sequence[str], count: int) -> np.ndarray:
    _check_opcodes(content, _MOST_OPCODES * (count + 100))
    loaded = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    batch = {_text(key): value for key, value in loaded.items()}
    labels = [np.array(batch[key]) for key in label_keys]
    pixels = batch["data"].array((count, _PIXELS))
    for each in labels:
        if each.shape != (count,) or each.dtype.kind not in "iu":
            raise _RefusedError(f"it does not hold {count:,} labels")
        if each.min() < 0 or each.max() > np.iinfo(np.uint8).max:
            raise _RefusedError("its labels are no bytes")
    columns = [each.astype(np.uint8)[:, np.newaxis] for each in labels]
    return np.concatenate([*columns, pixels], axis=1)


def _check_opcodes(content: bytes, most: int) -> None:
    """Refuses what would take memory out of proportion to its size."""
    value: Any
    for number, (opcode, value, _) in enumerate(pickletools.genops(content)):
        is_index = opcode.name in ("PUT", "LONG_BINPUT")
        if number > most or (is_index and value > most):
            raise _RefusedError("its pickle is too long")


def _text(value: Any) -> str:
    """Decodes the texts of Python 2, which are bytes here."""
    return value.decode("latin-1") if isinstance(value, bytes) else value


class _Type:
    """Stands in for NumPy's type of a pickled array."""

    def __init__(self, name: str | bytes, *_: Any) -> None:
        self.name = _text(name)

    def __setstate__(self, state: Any) -> None:
        """Ignores the order of bytes, which a uint8 does not have."""


class _Array:
    """Stands in for a pickled array; nothing is computed before `array` is called."""

    def __init__(self, *_: Any) -> None:
        self._state: Any = None

    def __setstate__(self, state: Any) -> None:
        """Keeps a version, the shape, the type, whether by columns, and the bytes."""
        self._state = state

    def array(self, shape: tuple[int, int]) -> np.ndarray:
        """Returns the array; raises a `ValueError` if it is not uint8 of this shape."""
        _, found, kind, is_by_column, content = self._state
        if found != shape or kind.name != "u1":
            raise ValueError
        order: Any = "F" if is_by_column else "C"
        return np.frombuffer(content, np.uint8).reshape(shape, order=order)


def _from_buffer(content: bytes, kind: _Type, shape: Any, order: str) -> _Array:
    """Stands in for what NumPy calls for arrays in pickles of protocol 5."""
    array = _Array()
    array.__setstate__((0, shape, kind, order == "F", content))
    return array


def _encode(text: str, encoding: str) -> bytes:
    """Stands in for what Python 3 calls for bytes in pickles of protocol 2."""
    if encoding != "latin1":
        raise ValueError
    return text.encode("latin-1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Returns a stand-in for one of NumPy's names, and refuses all others."""
        found = module.replace("numpy._core", "numpy.core", 1), name
        if found not in _STAND_INS:
            raise _RefusedError(f"its pickle asks for {module}.{name}")
        return _STAND_INS[found]
