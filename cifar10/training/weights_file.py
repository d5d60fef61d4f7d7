"""Reads the weights of a file that Keras has written, and nothing else of it.

A `.keras` file is a ZIP archive with a description of the model, which may name code to
run, and with `model.weights.h5`. Only the latter is opened: an HDF5 file with a group
for each layer. Only arrays in the shapes of their variables are read, and none that is
in parts, which may be compressed: so a file takes no more memory than these and itself.
"""

import contextlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import h5py
import numpy as np

from cifar10.errors import UsageError, printable, reason
from cifar10.models import layer_tree
from cifar10.process import files

_WEIGHTS = "model.weights.h5"
# A network of a thousand layers has about 3,000. Each takes half a millisecond.
_MOST_ENTRIES = 10_000
_VARIABLES, _OPTIMIZER = "vars", "optimizer/"


def read_layers(
    path: Path, wanted: Mapping[str, list[tuple[int, ...]]]
) -> dict[str, list[np.ndarray] | None]:
    """Reads the layers of a `.keras` or `.weights.h5` file that have wanted shapes.

    Args:
        path: The file, or a link to it.
        wanted: The shapes of the floating variables of each layer, by its name as
            `layer_tree.by_name` has it.

    Returns:
        The values of each layer with variables, by its name; None for one that is not
        wanted, or has other shapes.

    Raises:
        UsageError: It cannot be read, or is no such file.
    """
    try:
        with _opened(path) as content, h5py.File(content, "r") as file:
            return {
                name: _values(arrays)
                if [array.shape for array in arrays] == wanted.get(name)
                else None
                for name, arrays in _arrays_of_layers(file).items()
            }
    except FileNotFoundError as error:
        raise UsageError(
            f"--initial_weights {printable(str(path))}: there is no such file."
        ) from error
    except Exception as error:  # The parsers raise anything for a damaged file.
        raise UsageError(
            f"--initial_weights {printable(str(path))}: it cannot be read as a file of "
            f"Keras's: {printable(reason(error))}.\nIt may be damaged; write or fetch "
            "it again."
        ) from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens the HDF5 file that a file is, or that is in it."""
    with files.opened(path, follow=True) as file:
        if path.suffix != ".keras":
            yield file
            return
        with zipfile.ZipFile(file) as archive:
            entry = archive.getinfo(_WEIGHTS)
            # Keras does not compress it; so it takes no more memory than the file.
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its {_WEIGHTS} is compressed")
            yield io.BytesIO(archive.read(entry))


def _arrays_of_layers(file: h5py.File) -> dict[str, list[h5py.Dataset]]:
    """Returns the floating variables of each layer, in their order, by its name.

    Each object is visited once, and links to other places or files are not followed.
    """
    numbered: dict[str, dict[int, h5py.Dataset]] = {}
    visited: set[str] = set()

    def visit(path: str, item: h5py.Group | h5py.Dataset) -> None:
        visited.add(path)
        if len(visited) > _MOST_ENTRIES:
            raise ValueError(f"it has more than {_MOST_ENTRIES:,} entries")
        group, _, key = path.rpartition("/")
        if not key.isdecimal() or not group.endswith(f"/{_VARIABLES}"):
            return
        if not isinstance(item, h5py.Dataset):
            raise TypeError(f"{item.name} is no array")
        if item.external or item.is_virtual:
            raise ValueError(f"{item.name} is in another file")
        if item.dtype.kind == "f" and not path.startswith(_OPTIMIZER):
            numbered.setdefault(group, {})[int(key)] = item

    file.visititems(visit)
    return {
        _layer_name(file, group): [arrays[number] for number in sorted(arrays)]
        for group, arrays in numbered.items()
    }


def _layer_name(file: h5py.File, variables: str) -> str:
    """Returns the names of a layer and of those it is in, from its variables' path.

    A name that Keras made up is the class's and a number, which another process counts
    anew. The group has such a name too, by the layer's place in the model; the group's
    is used. A group without variables, even none, is a container of layers.
    """
    names = []
    *groups, _ = variables.split("/")
    for depth, key in enumerate(groups, 1):
        of_layer = "/".join([*groups[:depth], _VARIABLES])
        if isinstance(file.get(of_layer, getlink=True), h5py.HardLink):
            name = file[of_layer].attrs.get("name")
            is_own = isinstance(name, str) and not layer_tree.same_but_number(name, key)
            names.append(name if is_own else key)
    return "/".join(names)


def _values(arrays: list[h5py.Dataset]) -> list[np.ndarray]:
    for array in arrays:
        if array.chunks:  # A part may unpack to far more than the array's size.
            raise ValueError(f"{array.name} is compressed or in parts")
    values = [array[()] for array in arrays]
    with np.errstate(over="ignore"):
        in_float32 = [value.astype(np.float32) for value in values]
    if not all(np.isfinite(value).all() for value in in_float32):
        raise ValueError(f"{arrays[0].name} holds numbers that float32 does not")
    return values
