"""The input of a data set larger than memory, beside the same input in memory.

    python -m benchmarks.input_beyond_memory --folder /scratch

It writes 8 GB of generated pictures into a new folder there, as prepared ones lie on a
disk, and removes them at the end. Batches of 128 are made and thrown away, distorted as
the tutorial does, by processes of their own. Two take turns: one has a gigabyte of the
pictures in memory; one reads them from files that are in the system's cache, and may
have --memory GB of its own. A third starts when that cache is empty; it is compared to
threads that read pictures at random places and do nothing else.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import machine
from benchmarks.child import Child, tell
from benchmarks.rivals.input_alone import InputAlone
from cifar10.process import entry_point

SHAPE = (64, 64, 3)
RECORD = 64 * 64 * 3
PER_FILE = 256_000_000 // RECORD
BATCH_SIZE = 128
IN_MEMORY = 10**9
# Threads that read at once: more made no disk faster that this ran on.
READERS = 32
_UNITS = {"VmHWM": "most", "RssAnon": "its own", "RssFile": "mapped"}


class Pictures(NamedTuple):
    """A data set of generated pictures; it reads as one of `input/datasets.py` does."""

    folder: Path
    count: int
    on_disk: bool

    def files(self) -> list[Path]:
        """Returns the files, in order."""
        number = -(-self.count // PER_FILE)
        return [self.folder / f"train-{n:05d}.bin" for n in range(number)]

    def write(self) -> None:
        """Writes files of noise."""
        noise = np.random.default_rng(0)
        left = self.count
        for path in self.files():
            with path.open("wb") as file:
                file.write(noise.bytes(min(left, PER_FILE) * RECORD))
                file.flush()
                os.fsync(file.fileno())
            left -= PER_FILE

    def cache(self, *, full: bool) -> None:
        """Has the system read all files into its cache, or forget them."""
        for path in self.files():
            with path.open("rb", buffering=0) as file:
                if full:
                    while file.read(2**22):
                        pass
                else:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, _: str) -> tuple[Any, np.ndarray]:
        """Returns the images, on the disk or in memory, and their labels."""
        from cifar10.input.on_disk import ImagesOnDisk

        labels = np.zeros(self.count, np.int32)
        if self.on_disk:
            shape = (self.count, *SHAPE)
            return ImagesOnDisk(self.files(), shape, PER_FILE), labels
        content = [np.fromfile(path, np.uint8) for path in self.files()]
        images = np.concatenate(content)[: self.count * RECORD]
        return images.reshape(-1, *SHAPE), labels


def start(*, pictures: Pictures, memory: float | None) -> MeasuredInput:
    """Starts the input in this process, which may have `memory` GB of its own."""
    entry_point.import_tensorflow()
    if memory:
        limit = round(memory * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return MeasuredInput(batch_size=BATCH_SIZE, dataset=pictures)


class MeasuredInput(InputAlone):
    """An input that knows how much memory its process has."""

    def processor_seconds(self) -> float:
        """Returns how long this process has used the processor's cores."""
        return time.process_time()

    def memory(self) -> str:
        """Returns the memory of this process that is not swapped out, in words."""
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        found = dict(line.split(":") for line in lines)
        return ", ".join(
            f"{int(found[key].split()[0]) * 1024 / 1e9:.2f} GB {what}"
            for key, what in _UNITS.items()
        )


class Speed(NamedTuple):
    """Of a child, over some batches."""

    images_per_second: float
    seconds: float  # Of all cores, for a batch, those of its start-up left out.


def measure(child: Child, steps: int, untimed: int) -> Speed:
    """Returns the speed of a child over some batches, after others."""
    before = child.ask("processor_seconds")
    elapsed = child.ask("run", untimed, steps)
    used = child.ask("processor_seconds") - before
    return Speed(steps * BATCH_SIZE / elapsed, used / (steps + untimed))


def disk_alone(pictures: Pictures, count: int, readers: int) -> float:
    """Returns how many pictures a second the disk gives from random places."""
    files = [os.open(path, os.O_RDONLY) for path in pictures.files()]
    try:
        for file in files:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        chosen = random.SystemRandom().sample(range(pictures.count), count)

        def read(part: list[int]) -> None:
            for number in part:
                file, record = divmod(number, PER_FILE)
                if len(os.pread(files[file], RECORD, record * RECORD)) != RECORD:
                    raise OSError("a file is shorter than it was written")

        began = time.perf_counter()
        with ThreadPoolExecutor(readers) as threads:
            for _ in threads.map(read, (chosen[n::readers] for n in range(readers))):
                pass
        return count / (time.perf_counter() - began)
    finally:
        for file in files:
            os.close(file)


def batches_alone(pictures: Pictures, count: int) -> float:
    """Returns how many pictures a second our class reads, in batches of two threads."""
    images, _ = pictures.read("train")
    chosen = np.random.default_rng().permutation(pictures.count)[:count]
    batches = chosen.reshape(-1, BATCH_SIZE)
    began = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        for _ in threads.map(images.__getitem__, batches):
            pass
    return count / (time.perf_counter() - began)


def warm(pictures: Pictures, memory: float, repeats: int, steps: int) -> Iterator[str]:
    """Compares what is in the system's cache with what is in the process's memory."""
    few = Pictures(pictures.folder, IN_MEMORY // RECORD, on_disk=False)
    pictures.cache(full=True)
    of_memory: list[Speed] = []
    of_cache: list[Speed] = []
    with (
        Child(__name__, {"pictures": few, "memory": None}) as in_memory,
        Child(__name__, {"pictures": pictures, "memory": memory}) as cached,
    ):
        for number in range(repeats):
            tell(f"warm, {number + 1} of {repeats}")
            of_memory.append(measure(in_memory, steps, 20))
            of_cache.append(measure(cached, steps, 20))
        yield f"in memory: {_shown(of_memory)}; {in_memory.ask('memory')}"
        yield f"from the cache: {_shown(of_cache)}; {cached.ask('memory')}"
    pairs = [*zip(of_memory, of_cache, strict=True)]
    ratios = sorted(b.images_per_second / a.images_per_second for a, b in pairs)
    yield (
        f"from the cache to in memory: {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    # What others do on the machine changes the speed, but hardly this.
    ratio = statistics.median(a.seconds / b.seconds for a, b in pairs)
    yield f"by the time of the cores: {ratio:.2f}"


def _shown(speeds: Sequence[Speed]) -> str:
    images, seconds = map(statistics.median, zip(*speeds, strict=True))
    return f"{images:,.0f} images/s, {1e3 * seconds:.1f} ms of cores a batch"


def cold(pictures: Pictures, memory: float, repeats: int, steps: int) -> Iterator[str]:
    """Compares what is on the disk alone with what the disk can give."""
    tell("cold")
    count = steps * BATCH_SIZE
    pairs = []
    for _ in range(repeats):
        pictures.cache(full=False)
        disk = disk_alone(pictures, count, READERS)
        pictures.cache(full=False)
        pairs.append((disk, batches_alone(pictures, count)))
    disk, ours = (statistics.median(of_one) for of_one in zip(*pairs, strict=True))
    yield f"disk alone: {disk:,.0f} images/s, {READERS} readers"
    ratios = sorted(b / a for a, b in pairs)
    yield (
        f"batches alone: {ours:,.0f} images/s; to the disk "
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    pictures.cache(full=False)
    with Child(__name__, {"pictures": pictures, "memory": memory}) as from_disk:
        speed = measure(from_disk, steps, 5)
        yield f"from the disk: {_shown([speed])}; {from_disk.ask('memory')}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to use")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="of pictures")
    parser.add_argument("--memory", type=float, default=2.0, help="GB, of the limit")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="timed in a repetition")
    options = parser.parse_args(arguments)
    count = int(options.gigabytes * 1e9) // RECORD
    needed = max(count * RECORD, IN_MEMORY)
    if not options.folder.is_dir():
        parser.error(f"--folder {options.folder} is none")
    if shutil.disk_usage(options.folder).free < 1.1 * needed:
        parser.error(f"--folder {options.folder} lacks {1.1 * needed / 1e9:.1f} GB")
    described = machine.describe()
    print(
        f"{described['processor']}, {described['cores']} cores, {described['commit']}"
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        pictures = Pictures(Path(folder), needed // RECORD, on_disk=True)
        tell("writing")
        pictures.write()
        print(
            f"{needed / 1e9:.1f} GB of pictures, {options.memory} GB of memory allowed"
        )
        for line in warm(pictures, options.memory, options.repeats, options.steps):
            print(line, flush=True)
        for line in cold(pictures, options.memory, options.repeats, options.steps):
            print(line, flush=True)


if __name__ == "__main__":
    entry_point.run_program(main)
