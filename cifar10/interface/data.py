"""Makes a `Dataset` from the arrays that a program passes as data."""

import dataclasses
import os
from typing import Any

import numpy as np

from cifar10.config.data_flag import PYTHON, name_of
from cifar10.errors import UsageError, nfc, reason
from cifar10.input.dataset_base import Dataset, Images
from cifar10.input.pictures import arrays
from cifar10.input.records import SPLITS, WITHOUT_VAL, Split

# The splits that pairs of arrays stand for, by the number of pairs.
_ORDERS = {2: WITHOUT_VAL, 3: SPLITS}
_EXPECTED = (
    "Give (x, y), ((x, y), (x_test, y_test)) or ((x, y), (x_val, y_val), (x_test, "
    "y_test)), a finite tf.data.Dataset of (image, label) instead of a pair, or a "
    "cifar10.input.dataset_base.Dataset."
)


def as_dataset(data: Any, split: Split = "train") -> Dataset | None:
    """Converts data, or a pair as `split`, to a `Dataset`; a name or path to None."""
    if data is None or not name_of(data).startswith(PYTHON):
        return None
    data = tuple(map(_in_memory, data)) if type(data) is tuple else _in_memory(data)
    if isinstance(data, Dataset):
        return _checked(data)
    if not isinstance(data, tuple):
        raise UsageError(f"data: got {type(data).__name__}. {_EXPECTED}")
    order = _ORDERS.get(len(data)) if all(isinstance(p, tuple) for p in data) else None
    pairs = dict(zip(order, data, strict=True)) if order else None
    found = {}
    for name, pair in (pairs or {split: data}).items():
        if len(pair) != 2:
            raise UsageError(f"data: got {len(pair)} values, not a pair. {_EXPECTED}")
        try:
            found[f"x_{name}"], found[f"y_{name}"] = map(_array, pair)
        except Exception as error:  # NumPy may raise any exception here.
            one_size = "Bring all images to one size, and give each one label. "
            fix = one_size * ("inhomogeneous" in str(error)) + _EXPECTED
            raise UsageError(f"data: {reason(error).rstrip('.')}. {fix}") from error
    return arrays.array_dataset(found, "arrays from Python", name_of(data), None)


def _array(values: Any) -> np.ndarray:
    """Converts to an array; raises a `ValueError` for a mask, palette or rotation."""
    pictures = values if isinstance(values, list | tuple) else ()
    modes = {m for one in pictures if isinstance(m := getattr(one, "mode", 0), str)}
    if any(map(np.ma.is_masked, (values, *pictures))) or modes - {"L", "RGB"}:
        raise ValueError("a mask or palette would be lost: fill it, or convert to RGB")
    exif = (one.getexif() for one in pictures if hasattr(one, "getexif"))
    if any(tags.get(0x0112) in range(2, 9) for tags in exif):  # The orientation.
        raise ValueError("EXIF data rotate a picture: use ImageOps.exif_transpose")
    return np.asarray(values)


def _in_memory(data: Any) -> Any:
    """Converts a `tf.data.Dataset` of (image, label) to a pair of arrays."""
    if not hasattr(data, "element_spec"):
        return data
    specs = data.element_spec if isinstance(data.element_spec, tuple) else ()
    # Images and labels in batches have the same first dimension, of one size or None.
    first = {str(getattr(spec, "shape", ())[:1]) for spec in specs}
    is_batched = len(first) == 1 and "," in first.pop()
    if not hasattr(data, "cardinality"):
        raise UsageError(f"data: {data} is an iterator. {_EXPECTED}")
    if is_batched or (count := int(data.cardinality())) < 1:
        what, fix = ("batches", ".unbatch()") if is_batched else ("no known size", "")
        fix += ".apply(tf.data.experimental.assert_cardinality(IMAGES))"
        why = f"data: {data} has {what}"
        raise UsageError(f"{why}. Leave out .repeat(), and add {fix}.")
    if len(shapes := [getattr(one, "shape", None) for one in specs]) != 2:
        raise UsageError(f"data: {data} yields no pairs. {_EXPECTED}")
    sizes = [getattr(shape, "num_elements", int)() or 1 for shape in shapes]
    if count * sum(sizes) > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        why = f"{count:,} images, more than this machine's memory can hold"
        fix = "Give fewer, or a folder of pictures"
        raise UsageError(f"data: {data} has {why}. {fix}.")
    import tensorflow as tf

    try:
        return tuple(data.batch(count).get_single_element())
    except tf.errors.OpError as error:
        why = f"{data} cannot be read: {reason(error).rstrip('.')}"
        fix = f"It must yield {count:,} images of one size, each with its label"
        raise UsageError(f"data: {why}. {fix}.") from error


def _checked(data: Dataset) -> Dataset:
    """Returns a program's own `Dataset`; checks its images on reading."""

    def read(split: Split) -> tuple[Images, np.ndarray]:
        where = f"data.read({split!r})"
        images, labels = data.read(split)
        arrays.check_pixels(images.dtype, where)
        if not (len(images) and tuple(images.shape[1:]) == shape == (*shape[:2], 3)):
            found = f"has images {images.shape}, and image_shape is {shape}"
            raise UsageError(f"{where} {found}. Give at least one, (height, width, 3).")
        array, where = np.asarray(labels), f"the array of labels of {where}"
        return images, arrays.checked_labels(array, len(images), where, data.classes)

    shape, names = tuple(data.image_shape), [*data.class_names]
    if len({nfc(name) for name in names if isinstance(name, str)}) < len(names):
        found = f"data.class_names: {data.class_names!r} are not distinct strings"
        raise UsageError(f"{found}. Name each class once.")
    return dataclasses.replace(data, name=name_of(data), read=read)
