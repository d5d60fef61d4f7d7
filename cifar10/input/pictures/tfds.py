"""A data set of TensorFlow Datasets, where that is installed.

Its pictures are prepared like those of a folder: the data set gives the files' bytes,
and `decoding.py` makes the pixels.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cifar10.config.data_flag import TFDS
from cifar10.errors import UsageError, printable, reason, say
from cifar10.input.pictures import cache
from cifar10.input.pictures.dataset import (
    PictureDataset,
    Preparation,
    prepared_dataset,
)
from cifar10.input.pictures.listing import TESTS, TRAIN, Listing
from cifar10.process import entry_point

_LABELS = "labels.json"


def find_tfds(
    name: str, how: Preparation, data_dir: Path | None = None
) -> PictureDataset:
    """Finds a data set by its name, downloads it if necessary, and prepares it.

    Args:
        name: As `tfds.builder` takes it, such as "mnist" or "beans:0.1.0"; it may begin
            with "tfds:".
        how: How its pictures are prepared.
        data_dir: Where TensorFlow Datasets keeps its files, by default its own folder.
    """
    name = name.removeprefix(TFDS)
    builder = _builder(name, data_dir)
    splits = builder.info.splits
    if TRAIN not in splits:
        raise UsageError(
            f"{TFDS}{name} has no split {TRAIN}, only {', '.join(sorted(splits))}. "
            "Choose another data set."
        )
    # Beside a part named test another one is `val`.
    tests = [part for part in TESTS if part in splits]
    parts = [TRAIN, *tests[: 2 if "test" in tests else 1]]
    classes = [*map(printable, builder.info.features["label"].names)]
    counts = {part: int(splits[part].num_examples) for part in parts}
    files = [(f"{part}/{n:08d}", 0, 0) for part in parts for n in range(counts[part])]
    identity = builder.info.full_name, str(builder.data_dir), how.image_size, counts
    home = cache.folder_for(how.cache_home, name, *identity)
    labels = _labels(home, builder, parts, len(classes), len(files))
    parts_of = []
    for split, part in zip(("train", "test", "val"), parts, strict=False):
        parts_of += [split] * counts[part]
    listing = Listing(classes, files, labels, parts_of if len(parts) > 1 else None)
    contents = (
        functools.partial(bytes, content) for _, content in _examples(builder, parts)
    )
    # Finds it again as `data_dir`, in which each part of the name is a folder.
    root = Path(builder.data_dir).parents[builder.info.full_name.count("/")]
    return prepared_dataset(TFDS + name, root, home, listing, contents, how)


def _builder(name: str, data_dir: Path | None) -> Any:
    """Returns the builder of a data set, which is downloaded."""
    try:
        import tensorflow_datasets as tfds

        builder = tfds.builder(name, data_dir=data_dir and str(data_dir))
        with entry_point.drawing():
            builder.download_and_prepare()
    except Exception as error:  # It raises anything: of the name, network or disk.
        raise UsageError(
            f"TensorFlow Datasets does not give {name}: {reason(error).rstrip('.')}.\n"
            "pip install tensorflow-datasets installs it; its names are in "
            "tfds.list_builders()."
        ) from error
    features = builder.info.features
    # A `FeaturesDict` has no `get`.
    label = features["label"] if "label" in features else None  # noqa: SIM401
    if "image" not in features or not hasattr(label, "names"):
        raise UsageError(
            f"{TFDS}{name} has {', '.join(features)}; an image and a label that is a "
            "class are needed."
        )
    return builder


def _labels(
    home: Path, builder: Any, parts: list[str], classes: int, count: int
) -> list[int]:
    """Returns the label of each picture; they are kept, as reading them takes long."""
    with cache.opened(home) as folder, cache.locked(folder):
        labels = cache.load(folder / _LABELS, list[int]) or []
        if len(labels) == count and {*labels} <= {*range(classes)}:
            return labels
        say("Listing the pictures ...")
        labels = [label for label, _ in _examples(builder, parts)]
        wrong = sorted({*labels} - {*range(classes)})
        if wrong or len(labels) != count:
            raise UsageError(
                f"The data set has {len(labels):,} pictures of the {count:,} that it "
                f"announces, and labels that are no class: {wrong[:1] or 'none'}.\n"
                "Have TensorFlow Datasets prepare it again."
            )
        cache.save(folder / _LABELS, labels)
        return labels


def _examples(builder: Any, parts: list[str]) -> Iterator[tuple[int, bytes]]:
    """Yields label and bytes of the pictures, always in one order."""
    import tensorflow_datasets as tfds

    for part in parts:
        undecoded = {"image": tfds.decode.SkipDecoding()}
        examples = builder.as_dataset(
            split=part, decoders=undecoded, shuffle_files=False
        )
        for example in tfds.as_numpy(examples):
            yield int(example["label"]), bytes(example["image"])
