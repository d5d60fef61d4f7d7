"""Times the preparation of a folder of pictures beside the peers' reading of it once.

    python -m benchmarks.preparation

Each reads every picture of the same folder once, at one size, on all cores: ours into
its cache, with the SHA-256 and the disk's confirmation; Keras's
`image_dataset_from_directory` and torchvision's `ImageFolder` as batches thrown
away, as in a training's first epoch. Later epochs cost the peers the same again,
and ours nothing. They take turns, each in a process of its own, so that a machine whose
speed drifts treats them alike. Quote the ratios, not the absolute figures.

Without --pictures, photographs' likes are generated: JPEG files of 500 x 375 pixels.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import flags as shared, machine
from benchmarks.child import Child, RivalError, tell
from cifar10.process import entry_point

_READERS = ("ours", "keras", "torchvision")


def measure(
    pictures: Path, size: int, repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, str]]:
    """Returns the readers' pictures a second, milliseconds each, and who has none.

    The milliseconds are those of processors, in all threads and processes together.
    """
    rates: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    problems: dict[str, str] = {}
    for turn in range(
        -1, repeats
    ):  # The first is not timed: it fills the disk's cache.
        for name in _READERS:
            if name in problems:
                continue
            options = {"name": name, "pictures": str(pictures), "size": size}
            try:
                with Child("benchmarks.readers", options) as child:
                    count, seconds, processors = child.ask("read_once")
            except RivalError as error:
                problems[name] = str(error)
                continue
            if turn >= 0:
                rates.setdefault(name, []).append(count / seconds)
                costs.setdefault(name, []).append(processors / count * 1e3)
                tell(f"{name}: {count:,} pictures, {count / seconds:,.0f}/s")
    return rates, costs, problems


def markdown(
    rates: dict[str, list[float]],
    costs: dict[str, list[float]],
    problems: dict[str, str],
    size: int,
) -> str:
    """Returns the table of what was measured."""
    lines = [
        f"| read once at {size} x {size} | pictures/s | ours / it | CPU ms each |",
        "| --- | --- | --- | --- |",
    ]
    for name in _READERS:
        if name in problems:
            lines.append(f"| {name} | - ({problems[name]}) | - | - |")
            continue
        pairs = zip(rates["ours"], rates[name], strict=True) if "ours" in rates else ()
        ratio = statistics.median([own / other for own, other in pairs] or [0.0])
        rate = statistics.median(rates[name])
        cost = statistics.median(costs[name])
        lines.append(f"| {name} | {rate:,.0f} | {ratio:.2f} | {cost:.2f} |")
    return "\n".join(lines)


def generate(folder: Path, count: int) -> None:
    """Writes JPEG files of 500 x 375 pixels, about as large as photographs'."""
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(count):
        # Large shapes, and a grain that costs as many bytes as a photograph's details.
        low = random.integers(0, 256, (12, 16, 3), np.uint8)
        image = Image.fromarray(low).resize((500, 375), Image.Resampling.BICUBIC)
        grain = random.normal(0.0, 8.0, (375, 500, 1))
        pixels = np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8)
        path = folder / f"class {number % 10}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, quality=88)


def main() -> None:
    """Measures what the flags ask for and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=Path, help="a folder with classes")
    parser.add_argument("--count", type=int, default=3000, help="pictures to generate")
    parser.add_argument("--image_size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="timed turns of each")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    flags = parser.parse_args()
    shared.check_files(flags)
    shared.check_at_least_one(flags, "count", "image_size", "repeats")
    scratch = Path(tempfile.mkdtemp(prefix="pictures-"))
    try:
        pictures = flags.pictures or scratch
        if not flags.pictures:
            tell(f"Generating {flags.count:,} pictures ...")
            generate(scratch, flags.count)
        size = flags.image_size
        rates, costs, problems = measure(pictures.absolute(), size, flags.repeats)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(markdown(rates, costs, problems, size))
    if flags.json:
        content = {
            **machine.describe(),
            "pictures_per_second": rates,
            "processor_ms_per_picture": costs,
            "problems": problems,
        }
        flags.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(entry_point.run_program(main))
