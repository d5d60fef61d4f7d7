"""Exports the model of a run, and checks that the export computes the same.

The export is written under a temporary name, loaded in another process, compared with
the run's own model on test images, and only then renamed. So whatever exists under its
final name is complete and correct.
"""

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
from cifar10.tools.export import child, formats, preparation
from cifar10.tools.export.options import Options
from cifar10.towers import devices

# Images on which the exported model has to agree, and the largest difference, relative
# to the largest value: summing in another order stays below a third of it.
_IMAGES = 256
_TOLERANCE = 1e-5
# How long the export may take to compute them.
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
    trained = TrainedModel(
        directory, use_averages=options.use_averages, trust_model=options.trust_model
    )
    settings, classes = trained.settings, trained.classes
    step = trained.restore(options.step)
    model = _in_float32(trained)
    variables = "averaged" if options.use_averages else "raw"
    print(
        f"Model:  {settings['model']}, step {step} of {directory},\n"
        f"        {variables} variables; trained in {settings['precision']}, "
        f"exported in {_PRECISION}",
        flush=True,
    )
    dataset = datasets.find_again(settings, options.data_dir)
    images = np.asarray(dataset.read("test")[0][:_IMAGES])
    prepared = pipeline.prepare(tf.constant(images), settings["distortions"]).numpy()
    expected = formats.logits(model, prepared)
    result, shape = "probabilities", [None, None, None, trained.picture_shape[-1]]
    if options.with_preprocessing:
        expected = tf.nn.softmax(expected)
    else:
        images, result, shape = prepared, "logits", [None, *trained.image_shape]
    description = {
        "model": settings["model"],
        "distortions": settings["distortions"],
        "image_shape": list(trained.image_shape),
        "picture_shape": list(trained.picture_shape),
        "class_names": list(trained.class_names or dataset.class_names),
        "step": step,
        "use_averages": options.use_averages,
        "precision": _PRECISION,
        "trained_precision": settings["precision"],
        "data": dataset.name,
        "data_is_real": dataset.is_real,
        "simulated": settings["simulated"],
        "with_preprocessing": options.with_preprocessing,
        "input": {"name": "images", "dtype": images.dtype.name, "shape": shape},
        "output": {"name": result, "dtype": "float32", "shape": [None, classes]},
        "preparation": preparation.describe(
            settings["distortions"], trained.picture_shape
        ),
    }
    try:
        with tempfile.TemporaryDirectory(
            prefix=f".incomplete-{output.name}-", dir=output.parent
        ) as folder:
            temporary = Path(folder) / "model"
            formats.write(model, temporary, options.format, description)
            for part in (temporary, *temporary.rglob("*")):
                files.sync(part)
            computed = _in_a_fresh_process(temporary, options.format, images)
            difference = _difference(computed, expected.numpy())
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
    compared = (
        f"on {len(images)} test images of {dataset.description}\n"
        "        the export, in another process, differs by\n"
        f"        {difference:.1e} of the largest of the {result}"
    )
    if not is_same:
        limit = f"rounding explains {_TOLERANCE:.0e} at most"
        print(f"REFUSED: {compared}; {limit}. Nothing was written.", file=sys.stderr)
        return 1
    print(f"Check:  {compared} (at most {_TOLERANCE:.0e})")
    place = "metadata" if options.format == "onnx" else formats.DESCRIPTION
    print(
        f"Done:   {output}\n"
        f"        from {images.dtype} {shape}, as its {place} describes,\n"
        f"        to {result}, float32 [None, {classes}]"
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


def _difference(computed: np.ndarray, expected: np.ndarray) -> float:
    if computed.shape != expected.shape:
        return float("inf")
    return float(np.abs(computed - expected).max() / np.abs(expected).max())


def _in_a_fresh_process(path: Path, file_format: str, images: np.ndarray) -> np.ndarray:
    """Returns what a process without this package's model computes."""
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
    return np.load(path.with_name(child.OUTPUTS))


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
