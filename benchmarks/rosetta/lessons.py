"""Measures what the framework comparison of 2017 taught, in today's PyTorch.

    python -m benchmarks.rosetta.lessons [--rounds 20] [--threads 2]

Each lesson is a training step of the comparison's CNN on 64 random images, in two or
more ways that take turns; the last one is a pass over 5,000 images in batches. Printed
are the median time of each way and its ratio to the first.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn import functional

from benchmarks.rosetta.cnn_pytorch import Network

BATCH = 64
_IMAGES = 5000


def make_step(*, channels_last: bool = True, onednn: bool = True) -> Callable[[], None]:
    """Returns a function that runs one training step."""
    torch.manual_seed(0)
    order = torch.channels_last if channels_last else torch.contiguous_format
    network = Network(dropout=(0.0, 0.0, 0.0)).to(memory_format=order)
    optimizer = torch.optim.SGD(network.parameters(), 0.01, 0.9, fused=True)
    images = torch.rand(BATCH, 3, 32, 32).to(memory_format=order)
    labels = torch.randint(10, (BATCH,))

    def step() -> None:
        with torch.backends.mkldnn.flags(enabled=onednn):
            optimizer.zero_grad()
            functional.cross_entropy(network(images), labels).backward()
            optimizer.step()

    return step


def sliced(images: np.ndarray, labels: np.ndarray) -> Iterator[tuple]:
    """Yields batches of a shuffled order, taken by NumPy."""
    order = np.random.default_rng(0).permutation(len(labels))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        chosen = order[start : start + BATCH]
        yield torch.from_numpy(images[chosen]), torch.from_numpy(labels[chosen])


def lessons() -> dict[str, dict[str, Callable[[], object]]]:
    """Returns the ways of each lesson by name; the first is the usual one."""
    random = np.random.default_rng(0)
    images = random.random((_IMAGES, 3, 32, 32), np.float32)
    labels = random.integers(10, size=_IMAGES)
    data = torch.utils.data.TensorDataset(
        torch.from_numpy(images), torch.from_numpy(labels)
    )
    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True, drop_last=True)
    return {
        "channel order in memory": {
            "channels last": make_step(),
            "channels first": make_step(channels_last=False),
        },
        "library of the convolutions": {
            "oneDNN, which chooses an algorithm": make_step(),
            "PyTorch's own": make_step(onednn=False),
        },
        f"batches of {_IMAGES:,} images": {
            "NumPy's indexing": lambda: [*sliced(images, labels)],
            "DataLoader": lambda: [*loader],
        },
    }


def measure(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Returns the median seconds of each way; all take turns, after one warm-up."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            if number:
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def main() -> None:
    """Prints a table of all lessons."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=20, help="times each way runs")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch")
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    torch.set_flush_denormal(True)
    print("| lesson | way | ms | relative |\n| --- | --- | ---: | ---: |")
    for lesson, ways in lessons().items():
        medians = measure(ways, flags.rounds)
        first = next(iter(medians.values()))
        for name, seconds in medians.items():
            print(
                f"| {lesson} | {name} | {seconds * 1e3:.1f} | {seconds / first:.2f} |"
            )


if __name__ == "__main__":
    main()
