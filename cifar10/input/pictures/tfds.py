"""A data set of TensorFlow Datasets, where that is installed.

Its pictures are prepared like those of a folder: the data set gives the files' bytes,
and `decoding.py` makes the pixels.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cifar10.config import regular_files
from cifar10.errors import UsageError, printable, reason, say
from cifar10.input.pictures import preparation, scanning
from cifar10.input.pictures.dataset import PreparedDataset
from cifar10.input.pictures.listing import Listing
from cifar10.input.records import SPLITS, Split

PREFIX = "tfds:"


def find(
    name: str,
    *,
    image_size: int,
    validation_fraction: float,
    max_bad_images: float,
    cache: Path,
    data_dir: Path | None = None,
) -> PreparedDataset:
    """Finds a data set by its name, downloads it if necessary, and prepares it.

    Args:
        name: As `tfds.builder` takes it, such as "mnist" or "beans:0.1.0"; it may begin
            with "tfds:".
        image_size: As for a folder, and so are the next three.
        validation_fraction: See there.
        max_bad_images: See there.
        cache: See there.
        data_dir: Where TensorFlow Datasets keeps its files, by default its own folder.
    """
    name = name.removeprefix(PREFIX)
    builder = _builder(name, data_dir)
    parts = _parts(builder, name)
    identity = [builder.info.full_name, str(builder.data_dir), image_size]
    counts = {part: int(builder.info.splits[part].num_examples) for part in parts}
    home = preparation.folder_for(cache, name, *identity, counts)
    source = _Source(builder, parts, validation_fraction)
    with preparation.explained(home):
        listing = source.listing(home)
    prepared = preparation.prepare(
        home, listing, source.contents, image_size=image_size
    )
    # Finds it again as `data_dir`, in which each part of the name is a folder.
    root = Path(builder.data_dir).parents[builder.info.full_name.count("/")]
    return PreparedDataset.of(PREFIX + name, root, prepared, [], max_bad_images)


def _builder(name: str, data_dir: Path | None) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise UsageError(
            f"--data {PREFIX}{printable(name)} needs TensorFlow Datasets, which cannot "
            f"be imported here: {printable(reason(error))}.\nInstall it with pip "
            "install tensorflow-datasets."
        ) from error
    try:
        builder = tfds.builder(name, data_dir=data_dir and str(data_dir))
        builder.download_and_prepare()
    except Exception as error:  # It raises anything: of the name, network or disk.
        raise UsageError(
            f"TensorFlow Datasets does not give {printable(name)}: "
            f"{printable(reason(error)).rstrip('.')}.\nIts names are in "
            "tfds.list_builders()."
        ) from error
    features = builder.info.features
    # A `FeaturesDict` has no `get`.
    label = features["label"] if "label" in features else None  # noqa: SIM401
    if "image" not in features or not hasattr(label, "names"):
        raise UsageError(
            f"{PREFIX}{printable(name)} has {printable(', '.join(features))}; an image "
            "and a label that is a class are needed."
        )
    return builder


def _parts(builder: Any, name: str) -> dict[str, Split]:
    """Returns the splits to read, and what each one is for."""
    splits = set(builder.info.splits)
    if scanning.TRAIN not in splits:
        raise UsageError(
            f"{PREFIX}{printable(name)} has no split {scanning.TRAIN}, only "
            f"{', '.join(sorted(splits))}."
        )
    tests: list[Split] = ["test"]
    found = [part for part in scanning.TESTS if part in splits]
    return {scanning.TRAIN: "train", **dict(zip(found, tests, strict=False))}


class _Source:
    """The pictures of a data set, in the order of their list."""

    def __init__(
        self, builder: Any, parts: dict[str, Split], validation_fraction: float
    ) -> None:
        self._builder = builder
        self._parts = parts
        self._fraction = validation_fraction

    def listing(self, home: Path) -> Listing:
        """Returns the list; it is kept in a folder, as making it reads all pictures."""
        split = "" if "test" in self._parts.values() else f"-{self._fraction!r}"
        path = home / f"listing{split}.json"
        with contextlib.suppress(OSError, ValueError):
            return Listing.from_columns(json.loads(path.read_bytes()))
        say("Listing the pictures ...")
        names = self._builder.info.features["label"].names
        listing = Listing([printable(name) for name in names], [], [], [], [], 0)
        tests = 0
        for name, split, label, content in self._examples():
            if not 0 <= label < len(names):
                raise UsageError(
                    f"{printable(name)} has the label {label}, which is no class; it "
                    "cannot be trained or tested on."
                )
            listing.path.append(name)
            listing.size.append(len(content))
            listing.mtime_ns.append(0)
            listing.label.append(label)
            tests += split == "test"
        listing = dataclasses.replace(listing, tests=tests)
        home.mkdir(parents=True, exist_ok=True)
        regular_files.write_atomically(path, json.dumps(listing.columns()).encode())
        return listing

    def contents(self, first: int) -> Iterator[Callable[[], bytes]]:
        """Yields functions that return each picture's bytes, from a place onwards."""
        for _, _, _, content in itertools.islice(self._examples(), first, None):
            yield functools.partial(bytes, content)

    def _examples(self) -> Iterator[tuple[str, Split, int, bytes]]:
        """Yields name, part, label and bytes of each picture."""
        for wanted in SPLITS:
            for part, split in self._parts.items():
                if "test" in self._parts.values() and split != wanted:
                    continue
                for number, (label, content) in enumerate(self._read(part)):
                    name = f"{part}/{number:08d}"
                    if "test" not in self._parts.values():
                        is_test = scanning.falls_in_test(name, self._fraction)
                        split = "test" if is_test else "train"  # noqa: PLW2901
                    if split == wanted:
                        yield name, split, label, content

    def _read(self, part: str) -> Iterator[tuple[int, bytes]]:
        """Yields label and bytes of the pictures of a split, always in one order."""
        import tensorflow_datasets as tfds

        undecoded = {"image": tfds.decode.SkipDecoding()}
        examples = self._builder.as_dataset(
            split=part, decoders=undecoded, shuffle_files=False
        )
        for example in tfds.as_numpy(examples):
            yield int(example["label"]), bytes(example["image"])
