"""Images that stay on disk: each batch reads only its own images.

Reading takes a third of the time of mapping files into memory. Mapped pages are loaded
one page fault at a time, and count as the process's memory until they are unmapped
(`docs/archive/lab-notes.md`).
"""

import contextlib
import math
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cifar10.errors import UsageError
from cifar10.process import files


class ImagesOnDisk:
    """The images of one split, in files that contain only pixels.

    Index this object like a NumPy array of all images, by a slice or by an array.
    Several threads may read at once. The files must not change.

    Args:
        paths: The files, in order.
        image_shape: Height, width and channels of every image.
        per_file: Number of images in each file; the last file may have fewer.
        places: int64 [count], the index of each image among all images in the files.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self,
        paths: Sequence[Path],
        image_shape: tuple[int, int, int],
        per_file: int,
        places: np.ndarray,
    ) -> None:
        self.shape = (len(places), *image_shape)
        self._image_bytes = math.prod(image_shape)
        self.nbytes = len(places) * self._image_bytes
        self._per_file = per_file
        self._places = places
        opened = contextlib.ExitStack()
        weakref.finalize(self, opened.close)
        self._files = [
            opened.enter_context(files.opened(path, buffering=0)) for path in paths
        ]
        for file in self._files:
            # Batches are random, so reading ahead would not help.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, chosen: slice | np.ndarray) -> np.ndarray:
        """Reads the chosen images, uint8 [count, height, width, channels]."""
        numbers, places = np.divmod(self._places[chosen], self._per_file)
        size = self._image_bytes
        images = np.empty((len(numbers), *self.shape[1:]), np.uint8)
        wanted = [
            (self._files[number], start)
            for number, start in zip(numbers, (places * size).tolist(), strict=True)
        ]
        # Request all images from the disk before waiting for the first.
        for file, start in wanted:
            os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)
        for row, (file, start) in zip(images.reshape(-1, size), wanted, strict=True):
            if os.preadv(file.fileno(), [row.data], start) != size:
                raise UsageError(
                    f"{file.name} is damaged at byte {start:,}. Run again to renew it."
                )
        return images
