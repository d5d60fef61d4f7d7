"""Finds the data set of a run.

`find` chooses the module: `cifar.py` for CIFAR and its stand-in, `pictures/` for the
user's pictures. Both return a `Dataset`, so other modules need not know the difference.
"""

import dataclasses
import itertools
import os
import pkgutil
from pathlib import Path
from typing import Any

from cifar10.config import fields
from cifar10.config.data_flag import FILES, FINDABLE, FOLDER, PYTHON, located
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError, counted, nfc, say
from cifar10.input import cifar
from cifar10.input.dataset_base import Dataset, numbered_class_names
from cifar10.input.records import IMAGE_SHAPE, Split
from cifar10.input.regrouping import check_fractions, corrected, with_val
from cifar10.input.samples import found_among
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
            f"another version of this package.\n{IN_PYTHON}"
        )
    if data_dir is None:
        what = f"The path of this run's {data} is unknown"
        why = "the run is from another machine, or its config.json was edited"
        raise UsageError(f"{what}: {why}. Name it with --data_dir.")
    if data != FOLDER:
        find_file = pkgutil.resolve_name(f"cifar10.input.{FILES[f'.{data}']}")
        return find_file(Path(data_dir))
    from cifar10.input.pictures.dataset import find_folder

    # Not in CIFAR10_DATA_DIR, because other users may read or write that folder.
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = home / "cifar10" if home.is_absolute() else cifar.cache()
    return find_folder(Path(data_dir), cache, **further)


def find_for(
    wanted: fields.Dataset,
    given: Dataset | None = None,
    *,
    run: RecordedRun | None = None,
    whole: bool = False,
    say_notes: bool = True,
) -> Dataset:
    """Finds the data set that a configuration wants.

    Uses the data set that a program has `given`, if any. Then adds a val split and
    corrections, as wanted. Divides pictures as in `run`, if any; with `whole`, all are
    the test split. Prints the data set's notes if `say_notes`.
    """
    dataset = given or find(
        wanted.data,
        wanted.data_dir,
        wanted.data_url,
        image_size=wanted.image_size or DEFAULT_SIZE,
        validation_fraction=1.0 if whole else wanted.validation_fraction,
        max_bad_images=wanted.max_bad_images,
        val_fraction=wanted.val_fraction,
        run=run,
    )
    given_splits = () if dataset.name == FOLDER else dataset.splits
    check_fractions(given_splits, {"val": wanted.val_fraction}, "the data", run)
    for note in dataset.notes if say_notes else ():
        say(f"Note: {note.removesuffix('.')}.")
    dataset = with_val(dataset, wanted.val_fraction)
    return corrected(dataset, wanted.corrections) if wanted.corrections else dataset


def find_again(
    run: RecordedRun, data_dir: str | None = None, *, whole: bool = False
) -> Dataset:
    """Finds the data set of a run, in `data_dir` or else where the run recorded it.

    If a program passed arrays to the run, `data_dir` is a file or folder with them.
    Arrays in a file can be scored with any run. With `whole`, all pictures are `test`.
    """
    wanted = run.config.dataset
    recorded, file = wanted.data_dir, wanted.corrections
    # Pictures that cannot be used are named in a note; they stop only a training.
    how = {"corrections": None, "max_bad_images": 1.0, **_place_of(wanted, data_dir)}
    group = fields.unchecked(fields.Dataset, vars(wanted) | how)
    if whole and group.data != FOLDER:
        raise UsageError("--eval_data all needs a folder of pictures as --data_dir.")
    dataset = find_for(group, run=run, whole=whole)
    where = f"--data_dir {data_dir}" if data_dir else dataset.description
    dataset = fitted(dataset, run, where)
    if whole and _is_at_training_images(dataset, run):
        why = "--eval_data all would score the run's training pictures"
        raise UsageError(f"{why}. Give a folder of other pictures as --data_dir.")
    if str(dataset.directory) != recorded:
        return dataset
    # Without corrections, as of lost pictures, the test split is the same.
    if file and os.path.exists(file):  # noqa: PTH110
        try:
            dataset = corrected(dataset, file)
        except UsageError as error:
            say(f"Note: {error}")
    trained_on = run.facts.data_fingerprint
    if trained_on and dataset.fingerprint and trained_on != dataset.fingerprint:
        or_file = f", or their corrections in {file}," if file else ""
        say(f"Note: the pictures{or_file} have changed since this run began.")
    return dataset


def _place_of(wanted: fields.Dataset, data_dir: str | None) -> dict[str, Any]:
    """Returns `data_dir`, and `data` for arrays, of the data that `wanted` records."""
    recorded, is_of_program = wanted.data_dir, wanted.data.startswith(PYTHON)
    # Not `Path.exists`, which raises an error without permission to look.
    if data_dir and (is_of_program or Path(data_dir).suffix in FILES):
        if not os.path.exists(data_dir):  # noqa: PTH110
            raise UsageError(f"--data_dir {data_dir}: no such path. Correct it.")
        return located({"data": data_dir})
    if is_of_program:
        raise UsageError(
            f"The data of this run was in a Python program's memory.\n{IN_PYTHON}\nOr "
            "save the arrays with np.savez(file, x_train=...) and so on, and add "
            "--data_dir FILE.npz."
        )
    if data_dir is None and recorded and os.path.exists(recorded):  # noqa: PTH110
        return {"data_dir": recorded}
    if data_dir is None and wanted.data in FINDABLE:
        say("The run's data_dir is unknown, gone or not trusted; looking elsewhere.")
    return {"data_dir": data_dir}


def is_of_run(dataset: Dataset, run: RecordedRun) -> bool:
    """Returns whether scores on a data set count as those of a run.

    They count if the fingerprints before corrections are equal. Without one, as for
    unread CIFAR, the paths must be equal or, if the run's is gone, the kinds of data.
    """
    wanted, facts = run.config.dataset, run.facts
    place = wanted.data_dir or ""
    is_there = os.path.realpath(f"{dataset.directory}") == os.path.realpath(place)
    trained_on, found = facts.data_uncorrected, dataset.uncorrected
    if not trained_on and not (is_there and wanted.corrections):
        trained_on = facts.data_fingerprint  # Earlier, this was all that was recorded.
    if trained_on and (found := found or dataset.fingerprint):
        return found == trained_on
    return is_there or (dataset.name == wanted.data and not os.path.exists(place))  # noqa: PTH110


def say_seen(data: Dataset, run: RecordedRun, split: Split, most: int | None) -> None:
    """Prints a note if the run was trained on some of the `most` first images."""
    if split != "train" and (count := _seen(data, run, most, split)):
        what = f"{count} of {len(run.facts.data_sample)} sampled training images"
        say(f"Note: {what} of the run are among these. Scores on them are optimistic.")


def _seen(data: Dataset, run: RecordedRun, most: int | None, *splits: Split) -> int:
    sample, shape = run.facts.data_sample, tuple(run.facts.image_shape)
    if not sample or data.image_shape != shape:
        return 0
    read = (data.read(one)[0] for one in splits if one in data.splits)
    return len({*itertools.chain(*(found_among(some, sample, most) for some in read))})


def has_training_images(dataset: Dataset, run: RecordedRun) -> bool:
    """Returns whether a data set holds a run's training images, or most of them."""
    # By the paths, and by a sample, which recognizes copies.
    least = len(run.facts.data_sample) / 2
    is_there = _is_at_training_images(dataset, run)
    return is_there or _seen(dataset, run, None, *dataset.splits) > least


def _is_at_training_images(dataset: Dataset, run: RecordedRun) -> bool:
    """Returns whether a folder is, is in, or contains the training images of a run."""
    from cifar10.input.pictures.listing import split_of

    if not (dataset.directory and run.config.dataset.data_dir):
        return is_of_run(dataset, run)
    here = Path(os.path.realpath(dataset.directory))
    place = Path(os.path.realpath(run.config.dataset.data_dir))
    inner = here.relative_to(place).parts if place in here.parents else ()
    is_training = bool(inner) and split_of(inner[0]) not in ("test", "val")
    return is_training or here == place or here in place.parents


def fitted(dataset: Dataset, run: RecordedRun, name: str) -> Dataset:
    """Returns a data set, called `name`, that fits a run; refuses any other.

    Arrays only number their classes: they get the run's names, and may lack the last.
    """
    shape, names = describe(run)
    is_numbered = dataset.class_names == numbered_class_names(dataset.classes)
    if is_numbered and dataset.classes <= len(names):
        dataset = dataclasses.replace(dataset, class_names=names)
    fix = "Name the data of the training run, or other data with the same classes."
    if (dataset.image_shape, dataset.classes) != (shape, len(names)):
        raise UsageError(
            f"{name} has {counted(dataset.classes, 'class', 'classes')} and images of "
            f"{dataset.image_shape}, but the run has {len(names)} and {shape}. {fix}"
        )
    pairs = zip(names, dataset.class_names, strict=True)
    for number, (there, here) in enumerate(pairs):
        if nfc(there) != nfc(here):
            why = f"class {number} is {here}, but {there} in the run"
            raise UsageError(f"{name}: {why}. {fix}")
    return dataset


def describe(run: RecordedRun) -> tuple[tuple[int, int, int], tuple[str, ...]]:
    """Returns the image shape and class names of a run's data set."""
    names, shape = tuple(run.facts.class_names), tuple(run.facts.image_shape)
    if file_format := cifar.FORMATS.get(run.config.dataset.data):
        names, shape = names or file_format.class_names, IMAGE_SHAPE
    is_valid = len(shape) == 3 and 0 < min(shape) <= max(shape) <= _LARGEST_SIDE
    if not names or not is_valid or shape[2] not in (1, 3):
        why = "config.json lacks class_names or a valid image_shape"
        raise UsageError(f"{why}. Restore config.json.")
    height, width, channels = shape
    return (height, width, channels), names
