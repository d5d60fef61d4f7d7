"""What `benchmarks.preparation` times, each in a process of its own."""

from __future__ import annotations

import dataclasses
import os
import resource
import tempfile
import time
from pathlib import Path

_BATCH_SIZE = 128


@dataclasses.dataclass
class Reader:
    """Reads a folder of pictures once, in one of several ways."""

    name: str
    pictures: str
    size: int
    precision: str = "uint8"

    def read_once(self) -> tuple[int, float, float]:
        """Returns how many pictures were read, in how many seconds, and of processors.

        The latter, unlike the former, is hardly changed by what else a machine does.
        """
        before = _processor_seconds()
        count, seconds = getattr(self, f"_{self.name}")()
        return count, seconds, _processor_seconds() - before

    def _ours(self) -> tuple[int, float]:
        from cifar10.input.pictures.dataset import find_folder

        with tempfile.TemporaryDirectory() as cache:
            began = time.perf_counter()
            dataset = find_folder(
                Path(self.pictures),
                image_size=self.size,
                validation_fraction=0.1,
                max_bad_images=0.0,
                cache_home=Path(cache),
            )
            count = sum(len(dataset.read(split)[0]) for split in ("train", "test"))
            return count, time.perf_counter() - began

    def _keras(self) -> tuple[int, float]:
        import keras

        began = time.perf_counter()
        batches = keras.utils.image_dataset_from_directory(
            self.pictures,
            image_size=(self.size, self.size),
            crop_to_aspect_ratio=True,
            batch_size=_BATCH_SIZE,
            shuffle=False,
            verbose=False,
        )
        count = sum(len(labels) for _, labels in batches)
        return count, time.perf_counter() - began

    def _torchvision(self) -> tuple[int, float]:
        from torch.utils.data import DataLoader
        from torchvision import datasets, transforms

        began = time.perf_counter()
        steps = [
            transforms.Resize(self.size),
            transforms.CenterCrop(self.size),
            transforms.PILToTensor(),
        ]
        batches = DataLoader(
            datasets.ImageFolder(self.pictures, transforms.Compose(steps)),
            batch_size=_BATCH_SIZE,
            num_workers=len(os.sched_getaffinity(0)),
        )
        count = sum(len(labels) for _, labels in batches)
        return count, time.perf_counter() - began


def _processor_seconds() -> float:
    """Returns the time of processors that this process and its children have taken."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def start(name: str, pictures: str, size: int) -> Reader:
    """Returns a reader, after importing what it needs."""
    if name == "keras":
        import keras  # noqa: F401
    elif name == "torchvision":
        import torchvision  # noqa: F401
    return Reader(name, pictures, size)
