"""A data set of TensorFlow Datasets, where that is installed.

Its pictures are prepared like those of a folder: the data set gives the files' bytes,
and `decoding.py` makes the pixels.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cifar10.config.options import is_a
from cifar10.errors import UsageError, printable, reason, say
from cifar10.input.pictures import cache as caches, division as dividing, preparation
from cifar10.input.pictures.cache import Folder
from cifar10.input.pictures.dataset import PreparedDataset
from cifar10.input.pictures.listing import Listing
from cifar10.input.pictures.scanning import TESTS, TRAIN
from cifar10.process import entry_point

PREFIX = "tfds:"

# What is known of the pictures, in the order in which they are read.
_LIST = "listing.json"
_LIST_BYTES = 2**30


def find(
    name: str,
    *,
    image_size: int,
    validation_fraction: float,
    max_bad_images: float,
    cache: Path,
    division: str | None = None,
    data_dir: Path | None = None,
) -> PreparedDataset:
    """Finds a data set by its name, downloads it if necessary, and prepares it.

    Args:
        name: As `tfds.builder` takes it, such as "mnist" or "beans:0.1.0"; it may begin
            with "tfds:".
        image_size: As for a folder, and so are the next four.
        validation_fraction: See there.
        max_bad_images: See there.
        cache: See there.
        division: See there.
        data_dir: Where TensorFlow Datasets keeps its files, by default its own folder.
    """
    name = name.removeprefix(PREFIX)
    builder = _builder(name, data_dir)
    parts = _parts(builder, name)
    identity = [builder.info.full_name, str(builder.data_dir), image_size]
    counts = {part: int(builder.info.splits[part].num_examples) for part in parts}
    home = preparation.folder_for(cache, name, *identity, counts)
    source = _Source(builder, parts)
    with preparation.explained(home), caches.opened(home) as folder:
        listing = source.listing(folder, validation_fraction, division)
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
        with entry_point.drawing():
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


def _parts(builder: Any, name: str) -> list[str]:
    """Returns the split to train on, and the one to test on if there is one."""
    splits = set(builder.info.splits)
    if TRAIN not in splits:
        raise UsageError(
            f"{PREFIX}{printable(name)} has no split {TRAIN}, only "
            f"{', '.join(sorted(splits))}."
        )
    return [TRAIN, *[part for part in TESTS if part in splits][:1]]


class _Source:
    """The pictures of a data set, and their list."""

    def __init__(self, builder: Any, parts: list[str]) -> None:
        self._builder = builder
        self._parts = parts
        self._classes = [*map(printable, builder.info.features["label"].names)]
        self._tests: set[str] = set()

    def listing(self, folder: Folder, fraction: float, division: str | None) -> Listing:
        """Returns the list, divided unless there is a test part."""
        columns = self._kept(folder)
        if columns is None:
            with folder.locked():
                columns = self._kept(folder) or self._listed(folder)
        pictures = list(zip(*columns, strict=True))
        limits: list[int] = []
        self._tests = {
            name for name, _, _ in pictures if not name.startswith(f"{TRAIN}/")
        }
        if not self._tests:
            names: list[list[str]] = [[] for _ in self._classes]
            for name, _, label in pictures:
                names[label].append(name)
            limits = dividing.limits(names, fraction, division)
            self._tests = {
                name
                for name, _, label in pictures
                if dividing.hash_of(name) < limits[label]
            }
        pictures.sort(key=lambda picture: picture[0] in self._tests)
        path, size, label = map(list, zip(*pictures, strict=True))
        return Listing(
            classes=self._classes,
            path=path,
            size=size,
            mtime_ns=[0] * len(path),
            label=label,
            tests=len(self._tests),
            division=dividing.written(limits) if limits else None,
        )

    def _kept(self, folder: Folder) -> list[Any] | None:
        """Returns names, sizes and labels that were listed earlier; None without."""
        digest, _, content = (folder.read(_LIST, _LIST_BYTES) or b"").partition(b"\n")
        if digest != hashlib.sha256(content).hexdigest().encode():
            return None
        try:
            path, size, label = json.loads(content)
        except (ValueError, TypeError, RecursionError):
            return None
        is_right = (
            all(map(is_a, (path, size, label), (list[str], list[int], list[int])))
            and len(path) == len(size) == len(label) > 0
            and 0 <= min(label) <= max(label) < len(self._classes)
        )
        return [path, size, label] if is_right else None

    def _listed(self, folder: Folder) -> list[Any]:
        """Lists the pictures, which reads all of them; so the list is kept."""
        say("Listing the pictures ...")
        path: list[str] = []
        size: list[int] = []
        labels: list[int] = []
        for name, label, content in self._examples():
            if not 0 <= label < len(self._classes):
                raise UsageError(
                    f"{printable(name)} has the label {label}, which is no class; it "
                    "cannot be trained or tested on."
                )
            path.append(name)
            size.append(len(content))
            labels.append(label)
        content = json.dumps([path, size, labels]).encode()
        digest = hashlib.sha256(content).hexdigest().encode()
        folder.write(_LIST, digest + b"\n" + content)
        return [path, size, labels]

    def contents(self, first: int) -> Iterator[Callable[[], bytes]]:
        """Yields functions that return each picture's bytes, from a place onwards."""
        in_order = (
            content
            # The parts of the data set follow one another already.
            for wanted in ([None] if len(self._parts) > 1 else [False, True])
            for name, _, content in self._examples()
            if wanted is None or wanted == (name in self._tests)
        )
        for content in itertools.islice(in_order, first, None):
            yield functools.partial(bytes, content)

    def _examples(self) -> Iterator[tuple[str, int, bytes]]:
        """Yields name, label and bytes of each picture."""
        for part in self._parts:
            for number, (label, content) in enumerate(self._read(part)):
                yield f"{part}/{number:08d}", label, content

    def _read(self, part: str) -> Iterator[tuple[int, bytes]]:
        """Yields label and bytes of the pictures of a split, always in one order."""
        import tensorflow_datasets as tfds

        undecoded = {"image": tfds.decode.SkipDecoding()}
        examples = self._builder.as_dataset(
            split=part, decoders=undecoded, shuffle_files=False
        )
        for example in tfds.as_numpy(examples):
            yield int(example["label"]), bytes(example["image"])
