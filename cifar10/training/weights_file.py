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
from typing import BinaryIO, NamedTuple

import h5py
import numpy as np

from cifar10.errors import UsageError, printable, reason
from cifar10.models import layer_tree
from cifar10.process import files

_WEIGHTS = "model.weights.h5"
# Keras does not compress it, and others may; weights hardly become smaller.
_LARGEST_RATIO = 10
_MOST_ENTRIES = 10_000  # A network of a thousand layers has about 3,000.
_VARIABLES, _OPTIMIZER = "vars", "optimizer"


class Weights(NamedTuple):
    """What a file has of the layers that are wanted."""

    found: dict[str, list[np.ndarray]]  # The layers that have the wanted shapes.
    others: set[str]  # The names of its other layers with variables.


def read(path: Path, wanted: Mapping[str, list[tuple[int, ...]]]) -> Weights:
    """Reads the layers of a `.keras` or `.weights.h5` file that have wanted shapes.

    Args:
        path: The file, or a link to it.
        wanted: The shapes of the floating variables of each layer, by its name as
            `layer_tree.by_name` has it.

    Raises:
        UsageError: It cannot be read, or is no such file.
    """
    try:
        with _opened(path) as content, h5py.File(content, "r") as file:
            layers: dict[str, h5py.Group] = {}
            _find(file, (), layers, set())
            _check_count(sum(map(len, layers.values())))
            found = {
                name: _values(layers[name])
                for name, shapes in wanted.items()
                if name in layers and _shapes(layers[name]) == shapes
            }
            return Weights(found, {*layers} - {*found})
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
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"its {_WEIGHTS} is compressed in an unusual way")
            size = path.stat().st_size
            if entry.file_size > _LARGEST_RATIO * size:
                raise ValueError(
                    f"its {_WEIGHTS} would have {entry.file_size:,} bytes, and the "
                    f"file has {size:,}"
                )
            with archive.open(entry) as stream:
                # No more than that, whatever the archive says of it.
                yield io.BytesIO(stream.read(entry.file_size))


def _find(
    group: h5py.Group,
    names: tuple[str, ...],
    layers: dict[str, h5py.Group],
    seen: set[int],
) -> None:
    """Collects the variables of all layers within a group, by the layers' names."""
    _check_count(len(seen) + len(group))
    for key in sorted(group):
        inner = _inner(group, key)
        address = h5py.h5o.get_info(inner.id).addr
        if address in seen:
            continue
        seen.add(address)  # A group may be within itself.
        if not isinstance(inner, h5py.Group):
            continue
        if key == _VARIABLES:
            if names and len(inner):
                layers["/".join(names)] = inner
        elif names or key != _OPTIMIZER:
            _find(inner, (*names, *_layer_name(inner, key)), layers, seen)


def _check_count(entries: int) -> None:
    if entries > _MOST_ENTRIES:  # Each takes half a millisecond, and some kilobytes.
        raise ValueError(f"it has more than {_MOST_ENTRIES:,} entries")


def _inner(group: h5py.Group, key: str) -> h5py.Group | h5py.Dataset:
    if not isinstance(group.get(key, getlink=True), h5py.HardLink):
        raise TypeError("it has links to other files or places")
    return group[key]


def _layer_name(group: h5py.Group, key: str) -> list[str]:
    """Returns the name of a group's layer; nothing if it is a container of layers.

    A name that Keras made up is the class's and a number, which another process counts
    anew. The group has such a name too, by the layer's place in the model; the group's
    is used.
    """
    variables = group.get(_VARIABLES, getlink=True)
    if not isinstance(variables, h5py.HardLink):
        return []
    name = group[_VARIABLES].attrs.get("name")
    is_made_up = not isinstance(name, str) or layer_tree.same_but_number(name, key)
    return [key if is_made_up else name]


def _datasets(variables: h5py.Group) -> list[h5py.Dataset]:
    """Returns the floating variables of a layer, in their order."""
    found = []
    for key in sorted(filter(str.isdecimal, variables), key=int):
        dataset = _inner(variables, key)
        if not isinstance(dataset, h5py.Dataset):
            raise TypeError(f"{dataset.name} is no array")
        if dataset.external or dataset.is_virtual:
            raise ValueError(f"{dataset.name} is in another file")
        if dataset.dtype.kind == "f":
            found.append(dataset)
    return found


def _shapes(variables: h5py.Group) -> list[tuple[int, ...]]:
    return [dataset.shape for dataset in _datasets(variables)]


def _values(variables: h5py.Group) -> list[np.ndarray]:
    datasets = _datasets(variables)
    for dataset in datasets:
        if dataset.chunks:  # A part may unpack to far more than the array's size.
            raise ValueError(f"{dataset.name} is compressed or in parts")
    values = [dataset[()] for dataset in datasets]
    with np.errstate(over="ignore"):
        in_float32 = [value.astype(np.float32) for value in values]
    if not all(np.isfinite(value).all() for value in in_float32):
        raise ValueError(f"{variables.name} holds numbers that float32 does not")
    return values
