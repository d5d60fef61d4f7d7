"""Exports the model of a run, and checks that the export computes the same logits.

The export is written under a temporary name, loaded in another process, compared with
the run's own model on test images, and only then renamed. So whatever exists under its
final name is complete and correct.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from cifar10 import model as models
from cifar10.config import paths
from cifar10.errors import UsageError, reason
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import datasets, pipeline
from cifar10.run_directory import files
from cifar10.tools import child_process, packages
from cifar10.tools.export import child, formats
from cifar10.tools.export.options import Options
from cifar10.towers import devices

# Images on which the exported model has to agree, and the largest difference of logits,
# relative to the largest logit: summing in another order stays below a third of it.
_IMAGES = 256
_TOLERANCE = 1e-5
# How long the export may take to compute their logits.
_CHECK_SECONDS = 3600.0
# The only precision that the converter to ONNX supports.
_PRECISION = "float32"


def run(options: Options) -> int:
    """Exports a model; returns the exit code, 1 if the export computes other logits."""
    if options.format == "onnx":
        packages.require("export", "tf2onnx", "onnx", "onnxruntime")
    output = paths.locate(options.output)
    _check_free(output)
    devices.place_evaluation("cpu")
    directory = paths.locate_run(options.train_dir)
    trained = TrainedModel(directory, use_averages=options.use_averages)
    settings = trained.settings
    step = trained.restore(options.step)
    model = _in_float32(trained)
    print(
        f"Model:  {settings['model']}, step {step} of {directory}, "
        f"{'averaged' if options.use_averages else 'raw'} variables; trained in "
        f"{settings['precision']}, exported in {_PRECISION}",
        flush=True,
    )
    dataset = datasets.find_again(settings, options.data_dir)
    images = tf.constant(dataset.read("test")[0][:_IMAGES])
    prepared = pipeline.prepare(images, settings["distortions"]).numpy()
    description = {
        "model": settings["model"],
        "distortions": settings["distortions"],
        "image_shape": list(trained.image_shape),
        "class_names": list(trained.class_names or dataset.class_names),
        "step": step,
        "use_averages": options.use_averages,
        "precision": _PRECISION,
        "trained_precision": settings["precision"],
        "data": dataset.name,
        "data_is_real": dataset.is_real,
        "simulated": settings["simulated"],
    }
    try:
        with tempfile.TemporaryDirectory(
            prefix=f".incomplete-{output.name}-", dir=output.parent
        ) as folder:
            temporary = Path(folder) / "model"
            formats.write(
                model, trained.image_shape, temporary, options.format, description
            )
            for part in (temporary, *temporary.rglob("*")):
                files.sync(part)
            logits = _in_a_fresh_process(temporary, options.format, prepared)
            difference = _difference(logits, formats.logits(model, prepared).numpy())
            is_same = difference <= _TOLERANCE  # False for NaN.
            if is_same:
                _check_free(output)  # Another process may have created it meanwhile.
                files.rename(temporary, output)
                files.sync(output.parent)
    except (OSError, tf.errors.OpError) as error:
        raise UsageError(
            f"--output {output} cannot be written: {reason(error)}. Nothing was left.\n"
            "Free space there and make the folder writable, or name another place."
        ) from error
    result = (
        f"on {len(logits)} test images of {dataset.description} the export, in "
        f"another process, differs by {difference:.1e} of the largest logit"
    )
    if not is_same:
        limit = f"rounding explains {_TOLERANCE:.0e} at most"
        print(f"REFUSED: {result}; {limit}. Nothing was written.", file=sys.stderr)
        return 1
    print(f"Check:  {result} (at most {_TOLERANCE:.0e})")
    height, width, channels = trained.image_shape
    print(
        f"Done:   {output}, from images prepared as for evaluation, float32 [batch, "
        f"{height}, {width}, {channels}], to logits, float32 [batch, {logits.shape[1]}]"
    )
    return 0


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


def _difference(logits: np.ndarray, expected: np.ndarray) -> float:
    if logits.shape != expected.shape:
        return float("inf")
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def _in_a_fresh_process(path: Path, file_format: str, images: np.ndarray) -> np.ndarray:
    """Returns the logits that a process without this package's model computes."""
    np.save(path.with_name(child.IMAGES), images)
    output = child_process.run(
        child.__name__,
        file_format,
        str(path),
        seconds=_CHECK_SECONDS,
        # A GPU rounds to TF32, and its memory may be a training's.
        CUDA_VISIBLE_DEVICES="-1",
    )
    if output.error:
        raise formats.unusable(file_format, output.error)
    return np.load(path.with_name(child.LOGITS))


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
