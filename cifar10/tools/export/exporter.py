"""Exports the model of a run, and checks that the export computes the same logits.

The export is written under a temporary name, loaded in another process, compared with
the run's own model on test images, and only then renamed. So whatever exists under its
final name is complete and correct.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cifar10 import model as models
from cifar10.errors import UsageError, reason
from cifar10.follower.trained_model import TrainedModel, evaluation_logits
from cifar10.input import datasets
from cifar10.input.evaluation import evaluation_batches
from cifar10.run_directory import files, layout
from cifar10.tools import child_process
from cifar10.tools.export import formats
from cifar10.tools.export.options import Options
from cifar10.towers import devices

# Images on which the exported model has to agree, and the largest difference of logits,
# relative to the largest logit: summing in another order stays below a third of it.
_IMAGES = 256
_TOLERANCE = 1e-5
# The only precision that the converter to ONNX supports.
_PRECISION = "float32"


def run(options: Options) -> int:
    """Exports a model; returns the exit code, 1 if the export computes other logits.

    Raises:
        UsageError: There is nothing to export, or it cannot be written.
    """
    formats.check_packages(options.format)
    output = layout.locate(options.output)
    _check_free(output)
    devices.place_evaluation("cpu")
    export = _Export(options)
    with _temporary_path(output) as temporary:
        export.write(temporary, output)
        logits = _in_a_fresh_process(temporary, options.format, export.images)
        difference = _difference(logits, export.expected)
        result = (
            f"on {len(logits)} test images of {export.dataset.description} the export, "
            f"in another process, differs by {difference:.1e} of the largest logit"
        )
        if not difference <= _TOLERANCE:  # Not `>`, which NaN would pass.
            limit = f"rounding explains {_TOLERANCE:.0e} at most"
            print(f"REFUSED: {result}; {limit}. Nothing was written.", file=sys.stderr)
            return 1
        print(f"Check:  {result} (at most {_TOLERANCE:.0e}){export.agreement(logits)}")
        _check_free(output)  # Another process may have created it meanwhile.
        files.rename(temporary, output)
        files.sync(output.parent)
    height, width, channels = export.trained.image_shape
    print(
        f"Done:   {output}, from images prepared as for evaluation, float32 [batch, "
        f"{height}, {width}, {channels}], to logits, float32 [batch, {logits.shape[1]}]"
    )
    return 0


class _Export:
    """The model to export, and its logits for some test images."""

    def __init__(self, options: Options) -> None:
        directory = layout.locate(options.train_dir)
        self.options = options
        self.trained = TrainedModel(directory, use_averages=options.use_averages)
        self.settings = self.trained.settings
        self.step = self.trained.restore(options.step)
        self.model = _in_float32(self.trained)
        variables = "averaged" if options.use_averages else "raw"
        print(
            f"Model:  {self.settings['model']}, step {self.step} of {directory}, "
            f"{variables} variables; trained in {self.settings['precision']}, exported "
            f"in {_PRECISION}",
            flush=True,
        )
        self.dataset = datasets.find_again(self.settings, options.data_dir)
        images, labels = self.dataset.read("test")
        images, labels = images[:_IMAGES], labels[:_IMAGES]
        batches = evaluation_batches(
            images, labels, len(images), self.settings["distortions"]
        )
        self.images = next(iter(batches))[0].numpy()
        self.expected = _logits(self.model, self.model.trainable_variables, self.images)

    def write(self, path: Path, output: Path) -> None:
        """Writes the model to `path`; messages name `output` instead."""
        try:
            formats.write(
                self.model,
                self.trained.image_shape,
                path,
                self.options.format,
                self._description(),
            )
            for part in (path, *path.rglob("*")):
                files.sync(part)
        except (OSError, tf.errors.OpError) as error:
            raise UsageError(
                f"--output {output} cannot be written: {reason(error)}. Nothing was "
                "left.\nFree space there and make the folder writable, or name another "
                "place."
            ) from error

    def agreement(self, logits: np.ndarray) -> str:
        """Returns how many classes are the same in the precision of the training."""
        if self.settings["precision"] == _PRECISION:
            return ""
        trained = _logits(self.trained.model, self.trained.trainable, self.images)
        same = int((trained.argmax(axis=1) == logits.argmax(axis=1)).sum())
        return (
            f"\n        In the run's {self.settings['precision']}, {same} of "
            f"{len(logits)} get the same class."
        )

    def _description(self) -> dict[str, Any]:
        return {
            "model": self.settings["model"],
            "distortions": self.settings["distortions"],
            "image_shape": list(self.trained.image_shape),
            "class_names": list(self.trained.class_names or self.dataset.class_names),
            "step": self.step,
            "use_averages": self.options.use_averages,
            "precision": _PRECISION,
            "trained_precision": self.settings["precision"],
            "data": self.dataset.name,
            "data_is_real": self.dataset.is_real,
            "simulated": self.settings["simulated"],
        }


def _in_float32(trained: TrainedModel) -> keras.Model:
    """Returns the run's model in float32, with the values that it uses."""
    model = models.build(
        trained.settings["model"],
        trained.image_shape,
        trained.classes,
        precision=_PRECISION,
        options=trained.options,
    )
    variables = model.trainable_variables + model.non_trainable_variables
    values = [*trained.trainable, *trained.non_trainable]
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))
    return model


def _logits(
    model: keras.Model, trainable: Sequence[Any], images: np.ndarray
) -> np.ndarray:
    """Returns the logits that an evaluation scores."""
    non_trainable = [variable.value for variable in model.non_trainable_variables]
    values = [tf.convert_to_tensor(variable) for variable in trainable]
    return evaluation_logits(model, values, non_trainable, images)[0].numpy()


def _difference(logits: np.ndarray, expected: np.ndarray) -> float:
    if logits.shape != expected.shape:
        return float("inf")
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def _in_a_fresh_process(path: Path, file_format: str, images: np.ndarray) -> np.ndarray:
    """Returns the logits that a process without this package's model computes."""
    images_file = io.BytesIO()
    np.save(images_file, images)
    done = subprocess.run(  # noqa: S603 - this package's own module.
        child_process.command("cifar10.tools.export.child", file_format, str(path)),
        input=images_file.getvalue(),
        capture_output=True,
        # A GPU rounds to TF32, and its memory may be a training's.
        env=child_process.environment(CUDA_VISIBLE_DEVICES="-1"),
        check=False,
    )
    if done.returncode:
        stderr = done.stderr.decode(errors="replace")
        cause = child_process.cause_of_death(done.returncode, stderr)
        raise formats.unusable(file_format, cause)
    return np.load(io.BytesIO(done.stdout))


def _check_free(output: Path) -> None:
    if os.path.lexists(output):
        raise UsageError(
            f"--output {output} exists already, and nothing is overwritten.\nName "
            "another place, or move it away."
        )
    # `Path.is_dir` raises if this user may not read the parent.
    if not os.path.isdir(output.parent):  # noqa: PTH112
        raise UsageError(
            f"--output {output}: there is no folder {output.parent}.\nCreate it, or "
            "name another place."
        )


@contextlib.contextmanager
def _temporary_path(output: Path) -> Iterator[Path]:
    """Yields a path beside `output`; what is left there at the end is deleted."""
    temporary = output.with_name(f".incomplete-{output.name}-{os.getpid()}")
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # It is a folder, or does not exist.
            temporary.unlink()
