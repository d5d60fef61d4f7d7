"""The common form of all data sets: `Dataset`, and the `Images` of its splits."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from cifar10.input.records import WITHOUT_VAL, Split


class Images(Protocol):
    """The images of one split, such as a uint8 NumPy array."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Count, height, width and channels."""

    @property
    def dtype(self) -> np.dtype:
        """Always uint8."""

    @property
    def nbytes(self) -> int:
        """The number of bytes that all images take."""

    def __len__(self) -> int: ...

    def __getitem__(self, chosen: slice | np.ndarray) -> np.ndarray:
        """Returns the chosen images, uint8 [count, height, width, channels]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set on this machine.

    Attributes:
        name: The kind of data, as in `config.json`: "cifar10", "folder" and so on.
        directory: The `--data_dir` that finds the data again; None for data in memory.
        image_shape: Height, width and channels of every image.
        class_names: The name of each class, in the order of the labels.
        description: One line for the user, which says what and where the data set is.
        read: Function that returns the images and int32 labels [count] of a split.
        splits: The splits of the data set, in the order of `SPLITS`.
        fingerprint: SHA-256 of images and labels; None: a run hashes those in memory.
        uncorrected: The fingerprint before corrections; None without corrections.
        is_real: Whether the images are real; False for the generated stand-in.
        paths: The names of the images, by split; absent for a split without names.
        left_out: Maps the name of each left-out picture to the reason.
        notes: Notes for the user.
        division: The division into splits by hashes (`regrouping.py`), if any.

    Example:
        >>> x, y = np.zeros([64, 32, 32, 3], np.uint8), np.arange(64) % 2
        >>> dataset = Dataset(
        ...     name="black",
        ...     directory=None,
        ...     image_shape=(32, 32, 3),
        ...     class_names=("cat", "dog"),
        ...     description="64 black pictures",
        ...     read=lambda split: (x, y.astype(np.int32)),
        ... )
        >>> dataset.classes, dataset.validation_split
        (2, 'test')
    """

    name: str
    directory: Path | None
    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    description: str
    read: Callable[[Split], tuple[Images, np.ndarray]]
    splits: tuple[Split, ...] = WITHOUT_VAL
    fingerprint: str | None = None
    uncorrected: str | None = None
    is_real: bool = True
    paths: Mapping[Split, Sequence[str]] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()
    division: str | None = None

    @property
    def classes(self) -> int:
        """Number of classes; labels are 0 to `classes - 1`."""
        return len(self.class_names)

    @property
    def validation_split(self) -> Literal["val", "test"]:
        """The split for validation during training: `val` if it exists, else `test`."""
        return "val" if "val" in self.splits else "test"


def selected(images: Images, indices: np.ndarray) -> Images:
    """Selects images of a split by their indices; images on disk are not read yet."""
    is_array = isinstance(images, np.ndarray)
    return images[indices] if is_array else _SelectedImages(images, indices)


class _SelectedImages:
    """Selected images of a split on disk, which are read when they are indexed."""

    def __init__(self, images: Images, indices: np.ndarray) -> None:
        self._images, self._indices, self.dtype = images, indices, images.dtype
        self.shape = (len(indices), *images.shape[1:])
        self.nbytes = images.nbytes // len(images) * len(indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, chosen: slice | np.ndarray) -> np.ndarray:
        return self._images[self._indices[chosen]]


def numbered_class_names(classes: int) -> tuple[str, ...]:
    """Returns "class 0", "class 1" and so on: class names for a data set of arrays."""
    return tuple(f"class {label}" for label in range(classes))
