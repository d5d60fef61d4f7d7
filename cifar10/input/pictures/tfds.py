"""A data set of TensorFlow Datasets, where that is installed.

Its pictures are prepared like those of a folder: the data set gives the files' bytes,
and `decoding.py` makes the pixels.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cifar10.config.data_flag import TFDS
from cifar10.config.options import is_a
from cifar10.errors import UsageError, printable, reason, say
from cifar10.input.pictures import cache, preparation
from cifar10.input.pictures.dataset import PictureDataset, picture_dataset
from cifar10.input.pictures.listing import TESTS, TRAIN, Listing, divided
from cifar10.process import entry_point

_LABELS = "labels.json"


def find_tfds(
    name: str,
    *,
    image_size: int,
    validation_fraction: float,
    max_bad_images: float,
    cache_home: Path,
    division: str | None = None,
    data_dir: Path | None = None,
) -> PictureDataset:
    """Finds a data set by its name, downloads it if necessary, and prepares it.

    Args:
        name: As `tfds.builder` takes it, such as "mnist" or "beans:0.1.0"; it may begin
            with "tfds:".
        image_size: As of `find_folder`, and so are the next four.
        validation_fraction: The share of the test part of a data set that has none.
        max_bad_images: The share of pictures that may be bad and left out.
        cache_home: The folder for the prepared pictures of all data sets.
        division: How a run's pictures were divided, as `listing.divided` returns it.
        data_dir: Where TensorFlow Datasets keeps its files, by default its own folder.
    """
    name = name.removeprefix(TFDS)
    builder = _builder(name, data_dir)
    splits = builder.info.splits
    if TRAIN not in splits:
        raise UsageError(
            f"{TFDS}{name} has no split {TRAIN}, only {', '.join(sorted(splits))}."
        )
    # The training part, and the test part if there is one.
    parts = [TRAIN, *[part for part in TESTS if part in splits][:1]]
    classes = [*map(printable, builder.info.features["label"].names)]
    counts = {part: int(splits[part].num_examples) for part in parts}
    identity = builder.info.full_name, str(builder.data_dir), image_size, counts
    home = cache.folder_for(cache_home, name, *identity)
    with cache.opened(home) as folder:
        labels = _labels(folder, builder, parts, len(classes))
    names = [f"{part}/{n:08d}" for part in parts for n in range(counts[part])]
    is_test = [not name.startswith(f"{TRAIN}/") for name in names]
    if len(parts) > 1:
        division = None
    else:
        is_test, division = divided(
            names, labels, len(classes), validation_fraction, division
        )
    files = [(name, 0, 0) for name in names]
    listing = Listing(classes, files, labels, is_test, division)
    contents = (
        functools.partial(bytes, content) for _, content in _examples(builder, parts)
    )
    prepared = preparation.prepare(home, listing, contents, image_size)
    # Finds it again as `data_dir`, in which each part of the name is a folder.
    root = Path(builder.data_dir).parents[builder.info.full_name.count("/")]
    return picture_dataset(TFDS + name, root, home, listing, prepared, max_bad_images)


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


def _labels(folder: Path, builder: Any, parts: list[str], classes: int) -> list[int]:
    """Returns the label of each picture; they are kept, as reading them takes long."""
    count = sum(int(builder.info.splits[part].num_examples) for part in parts)
    with cache.locked(folder):
        labels = cache.load(folder / _LABELS)
        is_right = is_a(labels, list[int]) and {*labels} <= {*range(classes)}
        if is_right and len(labels) == count:
            return labels
        say("Listing the pictures ...")
        labels = [label for label, _ in _examples(builder, parts)]
        if wrong := [n for n, label in enumerate(labels) if not 0 <= label < classes]:
            raise UsageError(
                f"Picture {wrong[0]:,} of the data set has the label "
                f"{labels[wrong[0]]}, which is no class; it cannot be trained or "
                "tested on."
            )
        if len(labels) != count:
            raise UsageError(
                f"The data set has {len(labels):,} pictures and says that it has "
                f"{count:,}.\nHave TensorFlow Datasets prepare it again."
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
