"""Decodes pictures and ranks their classes, for `predict` and `serve`.

Pictures are decoded in separate processes, which end if a picture takes too long.
"""

import multiprocessing
import os
import resource
import signal
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
from PIL import Image

from cifar10.errors import UsageError
from cifar10.input.pictures import decoding

# Memory of a decoding process: the interpreter, and 12 bytes per pixel for Pillow.
_MEMORY = 2**30 + 16 * decoding.MAX_PIXELS
# Progressive JPEG files of this size, the slowest to decode, take half a second.
_BYTES_PER_SECOND = 10_000_000


class Decoder:
    """Decodes pictures in a separate process for each thread.

    A picture may take `seconds` of processor time, and one more second for each 10 MB.
    A process that takes longer ends, and the thread's next call starts a new one.
    """

    def __init__(self, seconds: float, max_pixels: int) -> None:
        self._seconds, self._max_pixels = seconds, max_pixels
        self._processes: dict[int, ProcessPoolExecutor] = {}

    def decode(
        self, content: bytes, name: str, shape: tuple[int, int, int]
    ) -> np.ndarray:
        """Decodes a picture to uint8 of a `shape`; a single channel is the brightness.

        A `PictureError` says why the picture called `name` cannot be decoded.
        """
        seconds = self._seconds + len(content) / _BYTES_PER_SECOND
        arguments = (content, name, seconds, shape, self._max_pixels)
        if (thread := threading.get_ident()) not in self._processes:
            # Not forked, because this process has TensorFlow's threads.
            spawn = multiprocessing.get_context("spawn")
            self._processes[thread] = ProcessPoolExecutor(1, spawn, _prepare_process)
        try:
            return self._processes[thread].submit(_decode, *arguments).result()
        except BrokenProcessPool as error:
            self._processes.pop(thread).shutdown()
            why = f"{name} takes more than {seconds:.1f} s, or crashes the decoder"
            raise decoding.PictureError(f"{why}. Make it smaller.") from error

    def close(self) -> None:
        """Ends the processes; no thread may be decoding any more."""
        for process in self._processes.values():
            process.shutdown()


def _prepare_process() -> None:
    """Makes a decoder limit its memory, ignore signals, and end with its parent."""
    warnings.simplefilter("ignore")  # Pillow's, of metadata.
    # A service that gets a signal still needs its decoders for the last answers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if not 0 <= before < _MEMORY:
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, hard))


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)


def _decode(
    content: bytes, name: str, seconds: float, shape: tuple[int, int, int], pixels: int
) -> np.ndarray:
    height, width, channels = shape
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process.
    try:
        image = decoding.decode(content, name, height, width, max_pixels=pixels)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if channels == 1:
        image = np.array(Image.fromarray(image).convert("L"))
    return image.reshape(shape)


def likeliest_classes(
    logits: np.ndarray, class_names: Sequence[str], top_k: int
) -> list[list[dict[str, Any]]]:
    """Returns the `top_k` likeliest classes for logits, floating [images, classes].

    The result is `ranked[image][rank]`, for JSON: a `class` and its `probability`.
    """
    if not np.isfinite(logits).all():
        why = "The model computes logits that are not finite."
        raise UsageError(f"{why} Use an earlier checkpoint.")
    logits = logits.astype(np.float64)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    ranked = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k]
    return [
        [{"class": class_names[i], "probability": float(row[i])} for i in indices]
        for row, indices in zip(probabilities, ranked, strict=True)
    ]
