"""Data that a program gives as objects, as a data set of this package."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from cifar10.config.data_flag import PYTHON, name_of
from cifar10.errors import UsageError, reason
from cifar10.input.dataset_base import Dataset, Images
from cifar10.input.datasets import check_same_kind, describe
from cifar10.input.pictures.arrays import array_dataset
from cifar10.input.pictures.dataset import PictureDataset
from cifar10.input.records import SPLITS, WITHOUT_VAL, Split

_WHERE = "arrays from Python"
# The parts of pairs of arrays, by their number.
_ORDERS = {2: WITHOUT_VAL, 3: SPLITS}
_EXPECTED = (
    "Give (x, y), ((x, y), (x_test, y_test)) or ((x, y), (x_val, y_val), (x_test, "
    "y_test)), or an object with the attributes of cifar10.input.dataset_base.Dataset."
)


def as_dataset(data: Any, split: Split = "train") -> Dataset | None:
    """Returns data as a data set; None for a name, which is looked up elsewhere.

    A single pair of arrays belongs to the `split`.
    """
    if data is None or not name_of(data).startswith(PYTHON):
        return None
    data = _read_streams(data)
    if not isinstance(data, tuple):
        return _wrap(data)
    order = _ORDERS.get(len(data)) if all(isinstance(p, tuple) for p in data) else None
    pairs = dict(zip(order, data, strict=True)) if order else None
    found = {}
    for name, pair in (pairs or {split: data}).items():
        if len(pair) != 2:
            raise UsageError(f"data: a tuple of {len(pair)} values. {_EXPECTED}")
        try:
            found[f"x_{name}"], found[f"y_{name}"] = map(np.asarray, pair)
        except Exception as error:  # NumPy may raise any exception here.
            raise UsageError(f"data: {reason(error)}. {_EXPECTED}") from error
    return array_dataset(found, _WHERE, name_of(data), None)


def _read_streams(data: Any) -> Any:
    """Reads each `tf.data.Dataset` into a pair of arrays, to be trained on as these.

    So its order does not matter, and a resumed run can compare what is in it.
    """
    import tensorflow as tf

    if isinstance(data, tuple):
        return tuple(map(_read_streams, data))
    if not isinstance(data, tf.data.Dataset):
        return data
    count, spec = int(data.cardinality()), data.element_spec
    if count < 1 or not isinstance(spec, tuple) or len(spec) != 2:
        what = {-1: "without end", -2: "of unknown size"}.get(count, f"of {count:,}")
        raise UsageError(
            f"data: a tf.data.Dataset {what} elements {spec}.\nIt has to be finite, of "
            "(image uint8 [height, width, 3], label), without repeat() and batch(). Of "
            "unknown size,\ntell it by .apply(tf.data.experimental.assert_cardinality("
            "number))."
        )
    try:
        parts = [*data.batch(1000).as_numpy_iterator()]
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))
    except Exception as error:  # Of the program's own functions, too.
        raise UsageError(f"data: {reason(error)}. {_EXPECTED}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Given(Dataset):
    """A program's data set under a unique name."""

    given: Any

    @property
    def parts(self) -> tuple[Split, ...]:
        return tuple(getattr(self.given, "parts", WITHOUT_VAL))

    def read(self, split: Split) -> tuple[Images, np.ndarray]:
        return self.given.read(split)


def _wrap(data: Any) -> Dataset:
    """Returns a program's object with the attributes of a data set as one."""
    names = [field.name for field in dataclasses.fields(Dataset)]
    missing = [name for name in (*names, "read") if not hasattr(data, name)]
    if missing:
        kind = type(data).__name__
        raise UsageError(f"data: {kind} has no {', '.join(missing)}. {_EXPECTED}")
    values = {name: getattr(data, name) for name in names}
    return _Given(**values | {"name": name_of(data)}, given=data)


def fitting(dataset: Dataset, settings: Mapping[str, Any]) -> Dataset:
    """Returns a data set to score a run on, if it fits the run's `config.json`.

    Raises:
        UsageError: It has other classes or images than the run's data.
    """
    described = describe(settings)
    if isinstance(dataset, PictureDataset) and dataset.classes < described.classes:
        # Some of the classes may have no pictures.
        dataset = dataclasses.replace(dataset, class_names=described.class_names)
    check_same_kind(dataset, settings, "data")
    return dataset
