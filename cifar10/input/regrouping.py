"""Regroups the images of a data set: divides them into splits, and corrects labels.

Images are divided into training, test and `val` splits by hashes of their names, each
class separately. Images with hashes below a limit are the test split, those below a
second limit the `val` split, and all others the training split. The division is the
same on every machine, and adding images moves few of the others.

Corrections leave training pictures out, or move them to other classes. They are in a
CSV file, which `python -m cifar10 data --train_dir` writes. The column `picture` names
a training picture. The column `class` names its new class, or is empty to leave the
picture out. An optional column `label` must equal the present class of the picture.
"""

import csv
import dataclasses
import hashlib
import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cifar10 import files
from cifar10.config import fields, layout
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError, counted, first_few, nfc, reason
from cifar10.input.dataset_base import Dataset, Images, selected
from cifar10.input.records import SPLITS, Split

# The settings that hold the fractions of the splits.
_FRACTIONS = {"test": "validation_fraction", "val": "val_fraction"}


def divided(
    names: Iterable[str],
    labels: np.ndarray,
    classes: Sequence[str],
    shares: Mapping[Split, float],
    run: RecordedRun | None = None,
) -> tuple[np.ndarray, str]:
    """Divides images into splits, by hashes of their names.

    A run records the hash limits of its splits in `config.json`, and uses them again
    after images are added. So no training image of the run is ever scored, and a run
    that begins with its weights trains on none of its held-out images.

    Args:
        names: The names of the images, such as paths.
        labels: The labels of the images.
        classes: The names of the classes.
        shares: The fraction of images for each split except the training split. New
            limits give each class a training image, and if possible one in each split.
        run: A run whose limits hold for the same classes and splits of equal fractions.

    Returns:
        The split of each image, str [count], and the division to record: for each split
        the limits of all classes, 16 hexadecimal digits each.
    """
    contents = (nfc(name).encode(errors="surrogateescape") for name in names)
    digests = (hashlib.sha256(content).digest()[:8] for content in contents)
    hashes = np.array([*map(int.from_bytes, digests)], np.uint64)
    ends = np.cumsum(np.bincount(labels, minlength=len(classes)))
    of_classes = np.split(hashes[np.lexsort((hashes, labels))], ends[:-1])
    wanted = [*shares.values()]
    limits = np.array([_limits(some, wanted) for some in of_classes], np.uint64).T
    earlier = recorded_limits(run) if run else {}
    for row, (split, share) in enumerate(shares.items()):
        if run and getattr(run.config.dataset, _FRACTIONS[split]) == share:
            for index, name in enumerate(map(nfc, classes)):
                if row < len(earlier.get(name, ())):
                    limits[row, index] = earlier[name][row]
    splits = np.full(len(hashes), "train")
    for split, of_split in [*zip(shares, limits, strict=True)][::-1]:
        splits[hashes < of_split[labels]] = split
    return splits, limits.astype(">u8").tobytes().hex()


def recorded_limits(run: RecordedRun) -> dict[str, np.ndarray]:
    """Maps the classes of a run to the hash limits of its splits, uint64 [splits]."""
    division, names = run.facts.data_division or "", run.facts.class_names
    if not names or len(division) % (16 * len(names)):
        return {}
    limits = np.frombuffer(bytes.fromhex(division), ">u8").reshape(-1, len(names))
    return dict(zip(map(nfc, names), limits.T, strict=True))


def check_fractions(
    given: Collection, wanted: Mapping[Any, float], data: Any, run: RecordedRun | None
) -> None:
    """Refuses a fraction for a split that the data has already, unless `run` has it.

    A fraction of 1 (by no flag) makes all pictures that split. Messages name `data`.
    """
    for split, part in wanted.items():
        name = _FRACTIONS[split]
        usual = {1.0, getattr(fields.Dataset, name)}
        usual |= {getattr(run.config.dataset, name)} if run else set()
        if split in given and part not in usual:
            raise UsageError(f"--{name} {part:g}: {data} has a {split} split. Omit it.")


def with_val(dataset: Dataset, fraction: float) -> Dataset:
    """Holds out a fraction of the training split as `val`, unless there is a `val`."""
    if not fraction or "val" in dataset.splits or "train" not in dataset.splits:
        return dataset
    _, labels = dataset.read("train")
    numbers = map(str, range(len(labels)))  # Instead of names.
    of_images, _ = divided(numbers, labels, dataset.class_names, {"val": fraction})
    indices = {split: np.flatnonzero(of_images == split) for split in SPLITS[:2]}
    return regrouped(dataset, indices, labels)


def _limits(hashes: np.ndarray, shares: Sequence[float]) -> list[int]:
    """Returns the upper hash limit of each split, from the sorted hashes of a class."""
    found, taken = [], 0
    for share in shares:
        # One image at least, unless none would remain to train on.
        count = min(max(1, int(share * len(hashes) + 0.5)), len(hashes) - 1 - taken)
        taken += max(count, 0) if share else 0
        found.append(int(hashes[taken - 1]) + 1 if taken else 0)
    return found


def names_of(dataset: Dataset, split: Split, count: int) -> Sequence[str]:
    """Returns the images' names; without names, numbers such as `train picture 0`."""
    return dataset.paths.get(split, [f"{split} picture {n}" for n in range(count)])


def regrouped(
    dataset: Dataset, indices: Mapping[Split, np.ndarray], labels: np.ndarray
) -> Dataset:
    """Makes the splits in `indices` from training images; keeps the other splits.

    `indices` holds each split's indices of images; `labels` has all images' labels.
    """
    names = names_of(dataset, "train", len(labels))
    splits = tuple(one for one in SPLITS if one in {*indices, *dataset.splits})
    paths: dict[Split, Sequence[str]] = {**dataset.paths}
    paths |= {split: [names[n] for n in ids.tolist()] for split, ids in indices.items()}

    def read(split: Split) -> tuple[Images, np.ndarray]:
        if split not in indices:
            return dataset.read(split)
        images, _ = dataset.read("train")
        return selected(images, indices[split]), labels[indices[split]]

    return dataclasses.replace(dataset, read=read, splits=splits, paths=paths)


def corrected(dataset: Dataset, name: str) -> Dataset:
    """Returns a data set whose training split is corrected by the CSV file `name`.

    The fingerprint and the description change too. Refuses an unknown picture or class,
    and corrections that leave no picture of a class.
    """
    _, before = dataset.read("train")
    labels = corrected_labels(dataset, name, "--corrections")
    if emptied := {*before.tolist()} - {*labels.tolist()}:
        last = dataset.class_names[min(emptied)]
        raise UsageError(f"--corrections {name} leaves no picture of {last}. Keep one.")
    kept = np.flatnonzero(labels >= 0)
    moved = np.count_nonzero(labels[kept] != before[kept])
    counts = f"leaves out {len(labels) - len(kept):,} and moves {moved:,}"
    digest = hashlib.sha256(f"{dataset.fingerprint}".encode() + labels.tobytes())
    return dataclasses.replace(
        regrouped(dataset, {"train": kept}, labels),
        fingerprint=digest.hexdigest(),
        uncorrected=dataset.uncorrected or dataset.fingerprint,
        description=f"{dataset.description}; --corrections {name} {counts}",
    )


def corrected_labels(dataset: Dataset, name: str, flag: str) -> np.ndarray:
    """Returns the training labels, corrected by a file; -1 for omitted images."""
    _, before = dataset.read("train")
    names = names_of(dataset, "train", len(before))
    indices = {nfc(path): index for index, path in enumerate(names)}
    classes = {nfc(name): label for label, name in enumerate(dataset.class_names)}
    labels = before.copy()
    done: dict[str, tuple[int, str]] = {}
    for line, path, to, label in read(name, flag):
        if path not in indices:
            why = "is not a training picture, as `data` names one. Correct it."
        elif label and classes.get(label) != before[indices[path]]:
            why = f"is not of class {label}. The file is for other data or splits."
        elif to and to not in classes:
            why = f"is moved to an unknown class, {to}. Correct its line."
        elif done.setdefault(path, (line, to))[1] != to:
            why = f"has a different class in line {done[path][0]}. Remove one line."
        else:
            labels[indices[path]] = classes[to] if to else -1
            continue
        raise UsageError(f"{flag} {name}, line {line}: {path or 'it'} {why}")
    return labels


def in_words(names: Sequence[str], old: np.ndarray, new: np.ndarray) -> Iterator[str]:
    """Yields phrases on the pictures that a change of labels omits (-1) or moves."""
    out = new < 0
    moved = ~out & (new != old)
    for which, how in ((out, "without"), (moved, "with another class of")):
        if chosen := [names[index] for index in np.flatnonzero(which).tolist()]:
            yield f"{how} {counted(len(chosen), 'picture')} ({first_few(chosen, 3)})"


def stand_ins(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Returns the index of the picture that fills each place, int64 [count].

    A kept picture fills its own place. A picture whose label `after` a change is -1 is
    replaced by the next picture, cyclically, that now has the omitted picture's label
    `before`, or else by the next kept picture.
    """
    indices = np.arange(len(before))
    for index in np.flatnonzero(after < 0):
        of_class = np.flatnonzero(after == before[index])
        kept = of_class if len(of_class) else np.flatnonzero(after >= 0)
        indices[index] = kept[np.searchsorted(kept, index) % len(kept)]
    return indices


def read(name: str, flag: str) -> list[tuple[int, str, str, str]]:
    """Reads a CSV file's lines: (number, picture, new class, class before correction).

    Skips the empty lines of spreadsheets. Columns are separated by `,`, `;` or tabs.
    """
    try:
        content = files.read(layout.absolute_path(name), 2**30, follow=True)
        # Paths need not be UTF-8. Spreadsheets add a byte order mark.
        text = content.decode("utf-8-sig", "surrogateescape")
        mark = max(",;\t", key=text.partition("\n")[0].count)
        lines = io.StringIO(text, newline="")
        rows = csv.DictReader(lines, delimiter=mark, strict=True)
        columns = [*(rows.fieldnames or ())]
        if not columns.count("picture") == columns.count("class") == 1:
            raise ValueError("it needs 1 picture and 1 class column")  # noqa: TRY301
        found = []
        for row in rows:
            if row["class"] is None or any(row.get(None, ())):
                why = f"line {rows.line_num} has fewer or more cells than the first"
                raise ValueError(why)  # noqa: TRY301
            texts = nfc(row["picture"]), nfc(row["class"]), nfc(row.get("label") or "")
            if any(texts):
                found.append((rows.line_num, *texts))
        return found  # noqa: TRY300
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(
            f"{flag} {name} cannot be read: {reason(error)}.\nThe file must be CSV, "
            "with the first line picture,class or picture,class,label."
        ) from error
