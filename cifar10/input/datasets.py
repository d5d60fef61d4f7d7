"""Finds the data set of a run.

`find` is the registry: `cifar.py` finds CIFAR's files, `pictures/` the user's pictures.
Both return a `Dataset`, and nearly all of the package knows nothing else.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar10.config.data_flag import FINDABLE, NPZ
from cifar10.errors import UsageError, say
from cifar10.input import cifar, records
from cifar10.input.corrections import corrected
from cifar10.input.dataset_base import Dataset
from cifar10.input.division import with_val
from cifar10.models.registry import IN_PYTHON

# Side of the images that pictures become unless `--image_size` says otherwise.
DEFAULT_SIZE = 64
# Larger ones are no pictures, and a model of such a size fits nowhere.
_LARGEST_SIDE = 4096


def find(
    data: str,
    data_dir: str | None = None,
    data_url: str | None = None,
    **preparation: Any,
) -> Dataset:
    """Finds a data set; downloads, generates or prepares it if need be.

    Args:
        data: As `config.dataset.data`.
        data_dir: Place of the data. For "cifar10", "cifar100", "synthetic" and "auto"
            see `cifar.find`; for "folder" and "npz" the folder or file itself.
        data_url: URL of CIFAR's archive.
        **preparation: For pictures: `image_size`, `validation_fraction`,
            `val_fraction` and `max_bad_images`, as in `config.dataset`; `division`, as
            recorded by a run.
    """
    _check_findable(data)
    if data in ("auto", *cifar.FORMATS):
        return cifar.find(data, data_dir, data_url)
    if data == NPZ:
        from cifar10.input.pictures.arrays import find_npz

        return find_npz(Path(_required(data, data_dir)))
    from cifar10.input.pictures.dataset import Preparation, find_folder

    how = Preparation(cache_of_pictures(), **preparation)
    return find_folder(Path(_required(data, data_dir)), how)


def cache_of_pictures() -> Path:
    """Returns the folder for what is prepared from the user's pictures.

    CIFAR10_DATA_DIR does not name it: others may read that folder, and write to it.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return home / "cifar10" if home.is_absolute() else cifar.cache()


def find_for(
    settings: Mapping[str, Any], given: Dataset | None = None, *, say_notes: bool = True
) -> Dataset:
    """Finds the data set of a configuration, or of a run by its `config.json`.

    A data set that a program has `given` is divided and corrected in the same way. The
    notes on pictures are printed unless the caller shows them.
    """
    names = ("image_size", "validation_fraction", "max_bad_images")
    # An older run has none of them, and needs none.
    preparation: dict[str, Any] = {name: settings.get(name) for name in names}
    preparation["image_size"] = preparation["image_size"] or DEFAULT_SIZE
    preparation["val_fraction"] = settings.get("val_fraction", 0.0)
    preparation["division"] = settings.get("data_division")
    dataset = given or find(
        settings["data"], settings["data_dir"], settings["data_url"], **preparation
    )
    for note in dataset.notes if say_notes else ():
        say(f"Note: {note}.")
    dataset = with_val(dataset, preparation["val_fraction"])
    if corrections := settings.get("corrections"):
        return corrected(dataset, corrections)
    return dataset


def find_again(settings: Mapping[str, Any], data_dir: str | None = None) -> Dataset:
    """Finds the data set of a run, in `data_dir` or else where it was."""
    _check_findable(settings["data"])
    recorded, corrections = settings["data_dir"], None
    # Not `Path.exists`: it fails where this user may not look.
    if data_dir is None and recorded is None:  # By `config/run_config.py`.
        say("You did not train this run here, so its data_dir is not used.")
    elif data_dir is None and os.path.exists(recorded):  # noqa: PTH110
        data_dir, file = recorded, settings.get("corrections")
        # Without the file the test part is the same.
        corrections = file if file and os.path.exists(file) else None  # noqa: PTH110
    elif data_dir is None:
        say(f"The run's data is no longer in {recorded}; looking elsewhere.")
    found = {"data_dir": data_dir, "corrections": corrections}
    dataset = find_for({**settings, **found})
    check_same_kind(dataset, settings, f"--data_dir {data_dir}")
    if str(dataset.directory) == recorded:
        recorded_as = settings.get("data_description", dataset.description)
        trained_on = settings.get("data_fingerprint")
        if trained_on and trained_on != dataset.fingerprint:
            say(
                "Note: the pictures have changed since this run began.\n"
                f"  now:   {dataset.description}\n"
                f"  then:  {recorded_as}"
            )
        else:  # The run's description says why it has this data set.
            dataset = dataclasses.replace(dataset, description=recorded_as)
    return dataset


def check_same_kind(dataset: Dataset, settings: Mapping[str, Any], name: str) -> None:
    """Refuses a data set of other images or classes than a run was trained on.

    `name` is what messages call the data set.
    """
    shape, names = describe(settings)
    fix = "Name the data that it was trained on, or a set of the same classes."
    if (dataset.image_shape, dataset.classes) != (shape, len(names)):
        raise UsageError(
            f"{name}: it has {dataset.classes} classes of images of "
            f"{dataset.image_shape}, and the run was trained on {len(names)} of "
            f"{shape}.\n{fix}"
        )
    if dataset.name == settings["data"] and dataset.name in cifar.FORMATS:
        return  # Its classes are fixed, whatever an older version called them.
    pairs = zip(names, dataset.class_names, strict=True)
    for number, (there, here) in enumerate(pairs):
        if there != here:
            raise UsageError(
                f"{name}: its class {number} is {here}, and the run's is {there}; "
                f"scores would mean nothing.\n{fix}"
            )


def describe(
    settings: Mapping[str, Any],
) -> tuple[tuple[int, int, int], tuple[str, ...]]:
    """Returns the shape of a run's images and the names of its classes.

    Refuses a `config.json` that lacks them.
    """
    data, names = settings["data"], settings.get("class_names")
    shape: Any = settings.get("image_shape")
    if file_format := cifar.FORMATS.get(data):
        shape, names = records.IMAGE_SHAPE, names or file_format.class_names
    elif not names or not _is_shape(shape):
        raise UsageError(
            "config.json lacks the names of the classes, or the images' shape. Restore "
            "it."
        )
    height, width, channels = shape
    return (height, width, channels), tuple(names)


def _check_findable(data: str) -> None:
    if data not in FINDABLE:
        raise UsageError(
            f"The data of this run is {data}: a program had it in memory, or the "
            f"version that wrote\nthe run looked it up.\n{IN_PYTHON}"
        )


def _is_shape(shape: Any) -> bool:
    return (
        isinstance(shape, list)
        and len(shape) == 3
        and all(0 < side <= _LARGEST_SIDE for side in shape[:2])
        and shape[2] in (1, 3)
    )


def _required(data: str, data_dir: str | None) -> str:
    if data_dir is None:
        raise UsageError(
            f"The data of this run is a user's own {data}, and its place is not known."
            "\nGive its path as --data_dir."
        )
    return data_dir
