"""Turns a folder of pictures into a data set."""

import hashlib
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cifar10.config.data_flag import FOLDER
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError, counted, nfc
from cifar10.input.dataset_base import Dataset, Images
from cifar10.input.pictures import cache
from cifar10.input.pictures.listing import list_folder
from cifar10.input.pictures.shards import PIXELS, Shards
from cifar10.input.records import Split
from cifar10.input.regrouping import check_fractions, divided
from cifar10.process import invocation

_SHOWN = 5  # Pictures in a message.


def find_folder(
    directory: Path,
    cache_home: Path,
    *,
    image_size: int,
    validation_fraction: float,
    max_bad_images: float,
    run: RecordedRun | None = None,
    val_fraction: float = 0.0,
) -> Dataset:
    """Returns the data set in a folder, and first decodes pictures not yet cached.

    Args:
        directory: The folder; `listing.py` describes its layout.
        cache_home: The folder for the prepared pictures of all data sets.
        image_size: Height and width of the images. The shorter side of a picture is
            resized to this size, then the centre is cropped.
        validation_fraction: The fraction for a test split that has no folder; 1 if all
            pictures are the test split, whatever their folder.
        max_bad_images: The fraction of pictures that may be bad and left out.
        run: A run that is divided alike, as for `divided`.
        val_fraction: The fraction for a `val` split that has no folder.

    Raises:
        UsageError: Too many pictures are bad, or a split has no pictures.
    """
    directory = directory.expanduser().absolute()
    of_run = run.facts.class_names if run else ()
    listing = list_folder(directory, of_run, whole=validation_fraction == 1.0)
    place = os.path.realpath(directory)
    home = cache.folder_for(cache_home, directory.name, place, image_size)
    files, classes = listing.files, listing.classes
    names = [path for path, _, _ in files]
    labels_of = np.array(listing.labels, np.int32)
    split_of, division = np.array(listing.splits), None
    wanted: dict[Split, float] = {"test": validation_fraction, "val": val_fraction}
    given = {*split_of.tolist()}
    check_fractions(given, wanted, directory, run)
    label_of = {nfc(name): label for label, name in enumerate(of_run)}
    if "train" not in given and {*classes} <= {*label_of}:
        # Pictures to score may lack classes of the run.
        labels_of = np.array([label_of[name] for name in classes], np.int32)[labels_of]
        classes = [*label_of]
    shares = {it: share for it, share in wanted.items() if share and it not in given}
    if shares and "train" in given:
        free = np.flatnonzero(split_of == "train")
        some, some_labels = [names[n] for n in free], labels_of[free]
        split_of[free], division = divided(some, some_labels, classes, shares, run)
    shards = Shards(home, directory, files, split_of, image_size)
    left_out = shards.left_out
    labels = {split: labels_of[indices] for split, indices in shards.indices.items()}
    counts = np.bincount(labels.get("train", ()), minlength=len(classes))
    splits = {**labels, **shares} if "train" in given else labels
    lacking = [f"for the {it} split" for it in splits if not len(labels.get(it, ()))]
    if "train" in labels and not counts.all():
        lacking.append(f"for {classes[int(counts.argmin())]} in the train split")
    if lacking:
        # The reasons of this class come first.
        of_class = dict(zip(names, counts[labels_of].tolist(), strict=True))
        first = sorted(left_out, key=lambda name: of_class[name])
        raise UsageError(
            f"None of the {len(files):,} pictures in {directory} is left {lacking[0]}. "
            f"Add usable ones, at least {1 + len(shares)} for each class"
            f"{', or score all of them with eval --eval_data all' if run else ''}."
            + "".join(f"\n    {left_out[name]}" for name in first[:_SHOWN])
        )
    lists = f"{invocation.command('data')} {shlex.quote(str(directory))} --json lists"
    why = "\n    ".join([f"{lists} all:", *[*left_out.values()][:_SHOWN]])
    if len(left_out) > max_bad_images * len(files):
        raise UsageError(
            f"{len(left_out):,} of {len(files):,} pictures in {directory} cannot be "
            f"used, which is more than --max_bad_images {max_bad_images:g} allows. "
            f"Repair or remove them, or raise --max_bad_images. {why}"
        )
    notes = listing.notes
    if left_out:
        notes.append(f"left out: {counted(len(left_out), 'picture')}. {why}")

    def read(split: Split) -> tuple[Images, np.ndarray]:
        if split not in labels:
            why = f"{directory} has a folder {' and '.join(labels)}, but no {split}"
            fix = f"Add {split}/ with class folders"
            raise UsageError(f"{why}: it can be scored, not trained on. {fix}.")
        return shards.read(split), labels[split]

    usable = counted(len(files) - len(left_out), "picture")
    kinds = f"{len(classes):,} classes at {image_size} x {image_size}"
    return Dataset(
        name=FOLDER,
        directory=directory,
        image_shape=(image_size, image_size, 3),
        class_names=tuple(classes),
        description=f"{usable} of {kinds} in {directory}",
        fingerprint=_fingerprint(classes, image_size, labels, shards),
        read=read,
        splits=tuple(labels),
        paths={split: [names[n] for n in ids] for split, ids in shards.indices.items()},
        left_out=left_out,
        notes=notes,
        division=division,
    )


def _fingerprint(
    classes: list[str], side: int, labels: Mapping[Split, np.ndarray], shards: Shards
) -> str:
    """Returns the SHA-256 of the pixels, labels and classes of a data set."""
    blocks = {
        f"{split}-{number:05d}.bin": sha256
        for split, of_split in shards.hashes.items()
        for number, sha256 in enumerate(of_split)
    }
    seen = [PIXELS, classes, (side, side, 3), sorted(blocks)]
    digest = hashlib.sha256(json.dumps(seen).encode())
    for split in labels:
        digest.update(len(labels[split]).to_bytes(8))
        digest.update(labels[split].astype("<i4").tobytes())
    for name in sorted(blocks):
        digest.update(bytes.fromhex(blocks[name]))
    return digest.hexdigest()
