"""Takes the model out of a run and says so only when it has computed the same.

The result is written beside its place under another name, loaded in a process of its
own, compared with this package's model on real images, and renamed then. So what is
there under its name is whole and right.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from cifar10.follower import restoring
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import datasets, pipeline
from cifar10.run_directory import files, layout
from cifar10.tools import child_process
from cifar10.tools.export import formats
from cifar10.towers import devices

# Images on which the exported model has to agree, and the largest difference of the
# logits, over the largest logit: rounding of sums in another order stays below a third.
_IMAGES = 256
_TOLERANCE = 1e-5
# What every export computes in: the converter to ONNX takes nothing else.
_PRECISION = "float32"


@dataclasses.dataclass(frozen=True)
class Options:
    """What to export and where; the flags of `python -m cifar10 export`.

    Attributes:
        train_dir: Directory of the run.
        format: One of `formats.CHOICES`.
        output: File or folder to make.
        step: Step of the checkpoint; None for the newest intact one.
        use_averages: Whether to take the variables' moving averages.
        data_dir: Folder of the data set; None for the one that the run used.
    """

    train_dir: str
    format: str
    output: str
    step: int | None = None
    use_averages: bool = True
    data_dir: str | None = None


def run(options: Options) -> int:
    """Exports a model; returns the exit code, 1 where the result computes otherwise.

    Raises:
        UsageError: There is nothing to export, or something stands in the way.
    """
    formats.check_packages(options.format)
    output = layout.locate(options.output)
    _check_free(output)
    devices.place_evaluation("cpu")
    export = _Export(options)
    with _replaceable(output) as temporary:
        export.write(temporary, output)
        logits = _in_a_fresh_process(temporary, options.format, export.images)
        difference = _difference(logits, export.expected)
        figures = (
            f"{len(logits)} test images of {export.dataset.description}: in a process "
            f"of its own the logits differ by {difference:.1e} of the largest one"
        )
        # Written so that it is refused where either has a logit that is no number.
        if not difference <= _TOLERANCE:
            beyond = f"and at most {_TOLERANCE:.0e} is rounding. Nothing was left."
            print(f"REFUSED: {figures}, {beyond}", file=sys.stderr)
            return 1
        print(f"Check:  {figures} (at most {_TOLERANCE:.0e}){export.beside(logits)}")
        _check_free(output)  # Somebody may have written there meanwhile.
        files.rename(temporary, output)
        files.sync(output.parent)
    height, width, channels = export.trained.image_shape
    print(
        f"Done:   {output}, from images prepared as for evaluation, float32 [batch, "
        f"{height}, {width}, {channels}], to logits, float32 [batch, {logits.shape[1]}]"
    )
    return 0


class _Export:
    """The model to export, and what it computes for some images of its data set."""

    def __init__(self, options: Options) -> None:
        directory = layout.locate(options.train_dir)
        self.options = options
        self.trained = TrainedModel(directory)
        self.settings = self.trained.settings
        self.step = restoring.load(self.trained, directory, options.step).step
        self.used = self.trained.values(use_averages=options.use_averages)
        self.model = _in_float32(self.trained, self.used)
        kind = "averaged" if options.use_averages else "raw"
        print(
            f"Model:  {self.settings['model']}, step {self.step} of {directory}, "
            f"{kind} variables; trained in {self.settings['precision']}, exported in "
            f"{_PRECISION}",
            flush=True,
        )
        self.dataset = datasets.find_again(
            self.settings["data"],
            self.settings["data_dir"],
            self.settings["data_url"],
            options.data_dir,
        )
        self.images = _images(self.dataset, self.settings["distortions"])
        values = [variable.value for variable in self.model.trainable_variables]
        self.expected = _logits(self.model, values, self.images)

    def write(self, path: Path, output: Path) -> None:
        """Writes the model under a name of its own; `output` is what the user says."""
        shape, file_format = self.trained.image_shape, self.options.format
        try:
            formats.write(self.model, shape, path, file_format, self._description())
            for part in (path, *path.rglob("*")):
                files.sync(part)
        except (OSError, tf.errors.OpError) as error:
            raise UsageError(
                f"--output {output} cannot be written: {reason(error)}. Make room "
                "there and make the folder writable, or name another place. Nothing "
                "was left."
            ) from error

    def beside(self, logits: np.ndarray) -> str:
        """Says how far the run's own precision is from the exported one."""
        if self.settings["precision"] == _PRECISION:
            return ""
        own = _logits(self.trained.model, self.used, self.images)
        same = int((own.argmax(axis=1) == logits.argmax(axis=1)).sum())
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


def _in_float32(trained: TrainedModel, used: Sequence[tf.Variable]) -> keras.Model:
    """Returns the run's model in float32, with values for its trainable variables."""
    name, shape = trained.settings["model"], trained.image_shape
    model = models.build(
        name, shape, trained.classes, precision=_PRECISION, options=trained.options
    )
    others = [variable.value for variable in trained.model.non_trainable_variables]
    for variable, value in (
        *zip(model.trainable_variables, used, strict=True),
        *zip(model.non_trainable_variables, others, strict=True),
    ):
        variable.assign(tf.cast(value, variable.dtype))
    return model


def _images(dataset: datasets.Dataset, distortion: str) -> np.ndarray:
    """Returns the first test images as evaluation gives them to the model."""
    images, labels = dataset.read("test")
    images, labels = images[:_IMAGES], labels[:_IMAGES]
    batches = pipeline.evaluation_batches(images, labels, len(images), distortion)
    return next(iter(batches))[0].numpy()


def _logits(
    model: keras.Model, trainable: Sequence[tf.Variable], images: np.ndarray
) -> np.ndarray:
    """Returns what evaluation's own code computes."""
    others = [variable.value for variable in model.non_trainable_variables]
    return models.inference(model, trainable, others, images, training=False)[0].numpy()


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
            f"--output {output} is there already, and nothing is overwritten. Name "
            "another place, or move it away."
        )
    # Not `Path.is_dir`: it fails where this user may not look.
    if not os.path.isdir(output.parent):  # noqa: PTH112
        raise UsageError(
            f"--output {output}: there is no folder {output.parent}. Make it, or name "
            "another place."
        )


@contextlib.contextmanager
def _replaceable(output: Path) -> Iterator[Path]:
    """Yields a name beside the output; what is left under it at the end is deleted."""
    temporary = output.with_name(f".incomplete-{output.name}-{os.getpid()}")
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # It is no file, or there is none.
            temporary.unlink()
