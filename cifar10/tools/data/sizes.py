"""How large the pictures of a folder are before they are prepared."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

from cifar10.input.pictures import decoding
from cifar10.input.pictures.dataset import PreparedDataset
from cifar10.input.records import SPLITS


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Widths and heights in pixels, ordered by the shorter side."""

    smallest: tuple[int, int]
    median: tuple[int, int]
    largest: tuple[int, int]
    enlarged: int  # Pictures whose shorter side is below the prepared images'.


def of(dataset: PreparedDataset) -> Sizes:
    """Reads the first bytes of each picture's file."""

    def read(path: str) -> tuple[int, int]:
        return decoding.size(dataset.directory / path, path)

    paths = [path for split in SPLITS for path in dataset.prepared.paths(split)]
    # More threads than processors: a disk of a network answers late.
    with ThreadPoolExecutor(4 * len(os.sched_getaffinity(0))) as pool:
        found = sorted(pool.map(read, paths), key=lambda size: (min(size), max(size)))
    side = dataset.prepared.image_size
    return Sizes(
        smallest=found[0],
        median=found[len(found) // 2],
        largest=found[-1],
        enlarged=sum(min(size) < side for size in found),
    )
