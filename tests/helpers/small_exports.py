"""Helpers: exports, which are checked in copies of a process that are made quickly."""

import json
import zipfile

import numpy as np

import runs
from cifar10.tools import child_process, export as command


def export(run_dir, output, file_format="onnx", **options):
    return command.export_run(
        command.Options(str(run_dir), file_format, output=str(output), **options)
    )


def run_in_a_copy(module, *words, seconds, **variables):
    """Does what `child_process.run` does."""
    del seconds
    program = f"from {module} import main; main()"
    done = runs.run("-c", program, *words, env=variables)
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    error = ""
    if done.returncode:
        error = child_process.cause_of_death(done.returncode, done.stderr)
    return child_process.Output(messages, done.stderr, error)


def description(path):
    """Returns what the file of an export says of itself."""
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("cifar10.json"))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def apart(one, other):
    """Returns the largest difference, relative to the largest value."""
    return np.abs(one - other).max() / np.abs(other).max()
