"""The list of pictures that a data set is made of, before they are decoded."""

import dataclasses
import hashlib
import itertools
import json
from typing import Any

import numpy as np

from cifar10.input.records import Split


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
    # What was left out or is worth knowing; no part of what the data set is.
    notes: list[str] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.path)

    def split(self, index: int) -> Split:
        """Returns the part that a picture belongs to."""
        return "train" if index < len(self) - self.tests else "test"

    def keys(self) -> list[tuple[str, int, int]]:
        """Returns what shows whether a picture is the one that was decoded earlier."""
        return list(zip(self.path, self.size, self.mtime_ns, strict=True))

    def batches(self, length: int) -> list[range]:
        """Returns the pictures in batches, none of which belongs to both parts."""
        trains = len(self) - self.tests
        starts = [*range(0, trains, length), *range(trains, len(self), length)]
        return [range(*pair) for pair in itertools.pairwise([*starts, len(self)])]

    def columns(self) -> dict[str, Any]:
        """Returns all but the notes, for `from_columns`."""
        # Not `dataclasses.asdict`, which copies each entry.
        return {name: getattr(self, name) for name in self._columns()}

    @classmethod
    def from_columns(cls, columns: dict[str, Any]) -> "Listing":
        """Returns a list that `columns` has taken apart."""
        return cls(**{name: columns[name] for name in cls._columns()})

    def name(self) -> str:
        """Returns a name that distinguishes the list from any other."""
        digest = hashlib.sha256()
        for column in self.columns().values():
            if isinstance(column, list) and column and isinstance(column[0], int):
                part = np.array(column, "<i8").tobytes()
            else:
                part = json.dumps(column).encode()
            digest.update(len(part).to_bytes(8) + part)
        return digest.hexdigest()[:16]

    @classmethod
    def _columns(cls) -> list[str]:
        names = [field.name for field in dataclasses.fields(cls)]
        return [name for name in names if name != "notes"]
