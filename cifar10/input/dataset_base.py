"""What a data set is: `Dataset`, and the `Images` of its splits."""

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
        """Reads some of the images, uint8 [count, height, width, channels]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set that is on this machine.

    Attributes:
        name: What `config.json` calls it: "cifar10", "folder" and so on.
        directory: The `--data_dir` that finds it again; None if none does.
        image_shape: Height, width and channels of every image.
        class_names: The name of each class, in the order of the labels.
        description: One line for the user: which data set it is, and where.
        read: Returns the images of a part, and its labels, int32 [count].
        parts: The parts that it has, in the order of `SPLITS`.
        fingerprint: SHA-256 of what a training sees of it; None if its files cannot
            differ.
        is_real: Whether the images are real; False for the generated stand-in.
        paths: The names of each part's pictures; without, they are numbered.
        left_out: Why pictures are left out, by their names.
        notes: Notes for the user.
        division: How it was divided into parts; None if the parts were given.
    """

    name: str
    directory: Path | None
    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    description: str
    read: Callable[[Split], tuple[Images, np.ndarray]] = dataclasses.field(
        compare=False
    )
    parts: tuple[Split, ...] = WITHOUT_VAL
    fingerprint: str | None = None
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
        """The part on which a training decides: `val`, or `test` if there is none."""
        return "val" if "val" in self.parts else "test"


def selected(images: Images, places: np.ndarray) -> Images:
    """Returns some of the images of a part; what is on the disk stays there."""
    if isinstance(images, np.ndarray):
        return images[places]
    return _Some(images, places)


class _Some:
    """Some of the images of a part that stays on the disk."""

    def __init__(self, images: Images, places: np.ndarray) -> None:
        self._images, self._places, self.dtype = images, places, images.dtype
        self.shape = (len(places), *images.shape[1:])
        self.nbytes = images.nbytes // len(images) * len(places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, chosen: slice | np.ndarray) -> np.ndarray:
        return self._images[self._places[chosen]]
