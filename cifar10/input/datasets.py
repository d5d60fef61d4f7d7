"""Finds the data set of a run.

`find` chooses the module: `cifar.py` for CIFAR and its stand-in, `pictures/` for the
user's pictures. Both return a `Dataset`, so other modules need not know the difference.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar10.config.data_flag import FINDABLE, FOLDER, NPZ, PYTHON, located
from cifar10.config.options import is_a
from cifar10.errors import UsageError, counted, nfc, say
from cifar10.input import cifar
from cifar10.input.dataset_base import Dataset
from cifar10.input.records import IMAGE_SHAPE
from cifar10.input.regrouping import corrected, with_val
from cifar10.models.registry import IN_PYTHON

# Side of the images made from pictures without `--image_size`.
DEFAULT_SIZE = 64
# The largest side in a valid `config.json`: models of larger images fit no machine.
_LARGEST_SIDE = 4096


def find(
    data: str, data_dir: str | None = None, data_url: str | None = None, **further: Any
) -> Dataset:
    """Finds a data set; downloads, generates or prepares it if necessary.

    The named arguments are fields of `config.dataset`. `further` holds arguments of
    `find_folder`, for a folder of pictures.
    """
    if data in ("auto", *cifar.FORMATS):
        return cifar.find(data, data_dir, data_url)
    if data not in FINDABLE:
        raise UsageError(
            f"The data of this run, {data}, was in a Python program's memory, or needs "
            f"another version of this package.\n{IN_PYTHON}\nOr save the arrays with "
            "np.savez(file, x_train=...) and so on, and add --data_dir FILE.npz."
        )
    if data_dir is None:
        raise UsageError(
            f"The path of this run's {data} is not known: the run is of another "
            "machine, or its config.json was edited. Name it with --data_dir."
        )
    if data == NPZ:
        from cifar10.input.pictures.arrays import find_npz

        return find_npz(Path(data_dir))
    from cifar10.input.pictures.dataset import find_folder

    # Not in CIFAR10_DATA_DIR, because other users may read or write that folder.
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = home / "cifar10" if home.is_absolute() else cifar.cache()
    return find_folder(Path(data_dir), cache, **further)


def find_for(
    settings: Mapping[str, Any],
    given: Dataset | None = None,
    *,
    run: Mapping[str, Any] | None = None,
    say_notes: bool = True,
) -> Dataset:
    """Finds the data set for the settings of a configuration or of a `config.json`.

    Uses the data set that a program has `given`, if any. Then adds a val split and
    corrections, as the settings require. Divides pictures as in the `config.json` of
    `run`, if any. Prints the data set's notes if `say_notes`.
    """
    val_fraction = settings.get("val_fraction", 0.0)
    dataset = given or find(
        settings["data"],
        settings["data_dir"],
        settings["data_url"],
        image_size=settings.get("image_size") or DEFAULT_SIZE,
        validation_fraction=settings.get("validation_fraction"),
        max_bad_images=settings.get("max_bad_images"),
        val_fraction=val_fraction,
        run=run,
    )
    for note in dataset.notes if say_notes else ():
        say(f"Note: {note.removesuffix('.')}.")
    dataset = with_val(dataset, val_fraction)
    if corrections := settings.get("corrections"):
        return corrected(dataset, corrections)
    return dataset


def find_again(
    settings: Mapping[str, Any], data_dir: str | None = None, *, whole: bool = False
) -> Dataset:
    """Finds the data set of a run, in `data_dir` or else where the run recorded it.

    If a program passed arrays to the run, `data_dir` is a file or folder with them.
    With `whole`, all pictures of a folder are the test split.
    """
    if whole and settings["data"] != FOLDER:
        raise UsageError("--eval_data all needs a folder of pictures as --data_dir.")
    how = {**settings, "data_dir": data_dir, "corrections": None}
    recorded, file = settings["data_dir"], settings.get("corrections")
    # Not `Path.exists`, which raises an error without permission to look.
    if data_dir and settings["data"].startswith(PYTHON):
        how |= located({"data": data_dir})
    elif data_dir is None and recorded and os.path.exists(recorded):  # noqa: PTH110
        how["data_dir"] = recorded
    elif data_dir is None and settings["data"] in FINDABLE:
        say("The run's data_dir is unknown, gone or not trusted; looking elsewhere.")
    if whole:
        how["validation_fraction"] = 1.0
    dataset = find_for(how, run=settings)
    check_same_kind(dataset, settings, f"--data_dir {data_dir}")
    if whole and is_of_run(dataset, settings):
        raise UsageError(
            "--eval_data all would score what the run was trained on. Give the folder "
            "of other pictures as --data_dir."
        )
    if str(dataset.directory) != recorded:
        return dataset
    # Without the corrections file the test split is the same.
    if file and os.path.exists(file):  # noqa: PTH110
        dataset = corrected(dataset, file)
    trained_on = settings.get("data_fingerprint")
    if trained_on and trained_on != dataset.fingerprint:
        or_file = f", or their corrections in {file}," if file else ""
        say(f"Note: the pictures{or_file} have changed since this run began.")
    return dataset


def is_of_run(dataset: Dataset, settings: Mapping[str, Any]) -> bool:
    """Returns whether scores on a data set count as those of a run.

    They do if the data set has the path or the fingerprint of the run's data. CIFAR has
    no fingerprint; a copy at another path counts if nothing is left at the run's path.
    """
    place, here = settings["data_dir"] or "", str(dataset.directory)
    if os.path.realpath(here) == os.path.realpath(place):
        return True
    if trained_on := settings.get("data_fingerprint"):
        return dataset.fingerprint == trained_on
    return dataset.name == settings["data"] and not os.path.exists(place)  # noqa: PTH110


def check_same_kind(dataset: Dataset, settings: Mapping[str, Any], name: str) -> None:
    """Refuses a data set, called `name`, of other classes or shapes than the run's."""
    shape, names = describe(settings)
    fix = "Name the data of the training run, or other data with the same classes."
    if (dataset.image_shape, dataset.classes) != (shape, len(names)):
        raise UsageError(
            f"{name} has {counted(dataset.classes, 'class', 'classes')} and images of "
            f"{dataset.image_shape}, but the run has {len(names)} and {shape}. {fix}"
        )
    pairs = zip(names, dataset.class_names, strict=True)
    for number, (there, here) in enumerate(pairs):
        if nfc(there) != nfc(here):
            raise UsageError(
                f"{name}: class {number} is {here}, but {there} in the run. {fix}"
            )


def describe(
    settings: Mapping[str, Any],
) -> tuple[tuple[int, int, int], tuple[str, ...]]:
    """Returns the image shape and class names of a valid `config.json`."""
    names: Any = settings.get("class_names")
    shape: Any = settings.get("image_shape")
    if file_format := cifar.FORMATS.get(settings["data"]):
        names, shape = names or file_format.class_names, [*IMAGE_SHAPE]
    is_shape = is_a(shape, tuple[int, int, int]) and shape[2] in (1, 3)
    if not names or not is_shape or not 0 < min(shape) <= max(shape) <= _LARGEST_SIDE:
        raise UsageError(
            "config.json lacks class_names or a valid image_shape. Restore config.json."
        )
    height, width, channels = shape
    return (height, width, channels), tuple(names)
