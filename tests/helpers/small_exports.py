"""Helpers: exports, and what is in them."""

import json
import zipfile

import numpy as np

from cifar10.tools import export as command


def export(run_dir, output, **options):
    return command.export_run(
        command.Options(train_dir=str(run_dir), output=str(output), **options)
    )


def description(path):
    """Returns what the file of an export says of itself."""
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("cifar10.json"))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def apart(one, other):
    """Returns the largest difference, relative to the largest value."""
    return np.abs(one - other).max() / np.abs(other).max()
