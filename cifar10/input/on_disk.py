"""Images that stay on the disk: each batch reads its own.

Reading takes a third of the time of mapping the files into memory: mapped pages come
one fault at a time, and count as the process's memory until they are unmapped
(`docs/lab-notes.md`). Images in the system's cache are read without the disk.
"""

import errno
import math
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cifar10.errors import UsageError


class ImagesOnDisk:
    """The images of one split, in files of nothing but their pixels.

    Indexed by a slice or by an array of numbers, it reads what a numpy array of all
    images would give. Several threads may do so at once. The files must not change.

    Args:
        paths: The files.
        image_shape: Height, width and channels of every image.
        per_file: Images in a file; the last one has what is left.
        places: int64 [count], the place of each image among those in the files.
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
        self._files: list[int] = []
        weakref.finalize(self, _close, self._files)
        for path in paths:
            self._files.append(_open(path, len(paths)))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, chosen: slice | np.ndarray) -> np.ndarray:
        """Reads some images, uint8 [count, height, width, channels]."""
        files, places = np.divmod(self._places[chosen], self._per_file)
        size = self._image_bytes
        images = np.empty((len(files), *self.shape[1:]), np.uint8)
        rows = (row.data for row in images.reshape(-1, size))
        wanted = zip(rows, files.tolist(), (places * size).tolist(), strict=True)
        waiting = [request for request in wanted if not self._read_cached(*request)]
        for row, file, start in waiting:
            self._read(row, file, start)
        return images

    def _read_cached(self, row: memoryview, file: int, start: int) -> bool:
        """Reads an image that the system has in its cache, else asks the disk for it.

        This way the disk gets all requests before anything waits for the first.
        """
        descriptor = self._files[file]
        try:
            if os.preadv(descriptor, [row], start, os.RWF_NOWAIT) == len(row):
                return True
        except OSError:  # It is not there, or nobody can tell.
            pass
        os.posix_fadvise(descriptor, start, len(row), os.POSIX_FADV_WILLNEED)
        return False

    def _read(self, row: memoryview, file: int, start: int) -> None:
        read = 0
        while read < len(row):
            count = os.preadv(self._files[file], [row[read:]], start + read)
            if not count:
                path = Path(f"/proc/self/fd/{self._files[file]}").readlink()
                raise UsageError(
                    f"{path} ends within an image, after {path.stat().st_size:,} bytes."
                    f"\nIt is damaged: remove {path.parent}, and run again to have "
                    "it made again."
                )
            read += count


def _open(path: Path, number: int) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # It may be a pipe by now.
    try:
        file = os.open(path, flags)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise UsageError(
            f"{path.resolve()} cannot be opened: the data set has {number:,} files, "
            "more than this process may have open.\nRaise the limit, as with "
            "`ulimit -n 65536`."
        ) from error
    # Batches come from anywhere: an image's neighbours are not needed.
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    return file


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)
