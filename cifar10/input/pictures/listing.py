"""The list of pictures that a data set is made of, before they are decoded."""

import dataclasses
import hashlib
import json
from typing import TypeAlias

from cifar10.input.records import Split

# Path, size and time of change: whether a picture is the one that was decoded earlier.
Key: TypeAlias = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Listing:
    """Pictures, those to train on first and those to test on after them.

    The lists with one entry for each picture are columns, since reading 100,000
    pictures as objects would take a second.
    """

    classes: list[str]
    path: list[str]  # Within the folder, with /; it names the picture.
    size: list[int]  # In bytes; -1 where there is no file.
    mtime_ns: list[int]
    label: list[int]
    tests: int  # How many at the end of the list are to test on.
    # How they were divided, if no test part was there; see `division.py`.
    division: str | None = None
    # What was left out or is worth knowing; no part of what the data set is.
    notes: list[str] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.path)

    def places(self, split: Split) -> range:
        """Returns where the pictures of a part are in the list."""
        trains = len(self) - self.tests
        return range(trains) if split == "train" else range(trains, len(self))

    def keys(self) -> list[Key]:
        """Returns what shows whether a picture is the one that was decoded earlier."""
        return list(zip(self.path, self.size, self.mtime_ns, strict=True))

    def name(self) -> str:
        """Returns a name of the set of pictures, however it is divided."""
        return hashlib.sha256(json.dumps(sorted(self.keys())).encode()).hexdigest()
