"""Exports the model of a run, and checks that the export computes the same.

The export is written under a temporary name, loaded in another process, compared with
the run's own model on test images, and only then renamed. So whatever exists under its
final name is complete and correct.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cifar10 import model as models
from cifar10.config import layout
from cifar10.errors import UsageError, reason, say
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import datasets, pipeline
from cifar10.process import files
from cifar10.tools import child_process, packages
from cifar10.tools.export import child, comparison, formats, preparation
from cifar10.tools.export.comparison import Verdict
from cifar10.tools.export.options import Options
from cifar10.towers import devices

# Test images on which the exported model has to agree with the run's.
_IMAGES = 256
# With --quantize: test images to classify, at most, and training images from which the
# ranges of the activations are estimated; TensorFlow's guide says 100 to 500.
_CLASSIFIED = 10_000
_SAMPLES = 500
# How long the export may take to compute them.
_CHECK_SECONDS = 3600.0
# What the formats need besides TensorFlow.
_PACKAGES = {
    "onnx": ("tf2onnx", "onnx", "onnxruntime"),
    "litert": ("ai_edge_litert",),
}
# The only precision that the converter to ONNX supports.
_PRECISION = "float32"


def run(options: Options) -> int:
    """Exports a model; returns the exit code, 1 if the export computes differently."""
    packages.require("export", *_PACKAGES.get(options.format, ()))
    output = layout.absolute_path(options.output)
    _check_free(output)
    devices.place_evaluation("cpu")
    directory = layout.locate_run(options.train_dir)
    trained = TrainedModel(
        directory, use_averages=options.use_averages, trust_model=options.trust_model
    )
    settings, classes = trained.settings, trained.classes
    step = trained.restore(options.step)
    model = _in_float32(trained)
    precision = _PRECISION if options.quantize == "none" else options.quantize
    variables = "averaged" if options.use_averages else "raw"
    print(
        f"Model:  {settings['model']}, step {step} of {directory},\n"
        f"        {variables} variables; trained in {settings['precision']}, "
        f"exported in {precision}",
        flush=True,
    )
    dataset = datasets.find_again(settings, options.data_dir)
    all_images, all_labels = dataset.read("test")
    count = _IMAGES if options.quantize == "none" else _CLASSIFIED
    images, labels = _spread(all_images, all_labels, count=count)
    prepared = pipeline.prepare(tf.constant(images), settings["distortions"]).numpy()
    expected = _logits(model, prepared)
    result, shape = "probabilities", [None, None, None, trained.picture_shape[-1]]
    if options.with_preprocessing:
        expected = tf.nn.softmax(expected).numpy()
    else:
        images, result, shape = prepared, "logits", [None, *trained.image_shape]
    description = {
        **_description(trained, dataset),
        "step": step,
        "use_averages": options.use_averages,
        "precision": precision,
        "with_preprocessing": options.with_preprocessing,
        "input": {"name": "images", "dtype": images.dtype.name, "shape": shape},
        "output": {"name": result, "dtype": "float32", "shape": [None, classes]},
    }
    samples = None
    if options.quantize != "none":
        (chosen,) = _spread(dataset.read("train")[0], count=_SAMPLES)
        samples = pipeline.prepare(tf.constant(chosen), settings["distortions"]).numpy()

    def write(path: Path) -> Verdict:
        formats.write(model, path, options.format, description, samples)
        for part in (path, *path.rglob("*")):
            files.sync(part)
        computed = _in_a_fresh_process(path, options.format, images)
        if samples is None:
            return comparison.of_values(computed, expected, result)
        return comparison.of_precisions(computed, expected, labels)

    passed, finding, limit = _write_if_passed(output, write)
    compared = (
        f"on {len(images):,} test images of {dataset.description}\n"
        f"        the export, in another process, {finding} ({limit})"
    )
    if not passed:
        say(f"REFUSED: {compared}. Nothing was written.")
        return 1
    print(f"Check:  {compared}")
    place = "metadata" if options.format == "onnx" else formats.DESCRIPTION
    print(
        f"Done:   {output}\n"
        f"        from {images.dtype} {shape}, as its {place} describes,\n"
        f"        to {result}, float32 [None, {classes}]"
    )
    return 0


def _description(trained: TrainedModel, dataset: datasets.Dataset) -> dict[str, Any]:
    """Returns what an export says of its run, whatever was asked for."""
    settings = trained.settings
    return {
        "model": settings["model"],
        "distortions": settings["distortions"],
        "image_shape": list(trained.image_shape),
        "picture_shape": list(trained.picture_shape),
        "class_names": list(trained.class_names or dataset.class_names),
        "trained_precision": settings["precision"],
        "data": dataset.name,
        "data_is_real": dataset.is_real,
        "simulated": settings["simulated"],
        "preparation": preparation.describe(
            settings["distortions"], trained.picture_shape
        ),
    }


def _write_if_passed(output: Path, write: Callable[[Path], Verdict]) -> Verdict:
    """Gives its name only to what has passed; nothing is left of anything else."""
    try:
        with tempfile.TemporaryDirectory(
            prefix=f".incomplete-{output.name}-", dir=output.parent
        ) as folder:
            # Keras recognizes a file's format by the end of its name.
            temporary = Path(folder) / f"model{output.suffix}"
            verdict = write(temporary)
            if verdict.passed:
                _check_free(output)  # Another process may have created it meanwhile.
                files.rename(temporary, output)
                files.sync(output.parent)
    except (OSError, tf.errors.OpError) as error:
        raise UsageError(
            f"--output {output} cannot be written: {reason(error)}. Nothing was left.\n"
            "Free space there and make the folder writable, or name another place."
        ) from error
    return verdict


def _spread(*arrays: Any, count: int) -> list[np.ndarray]:
    """Returns rows from all parts of arrays: in a folder the first are of one class."""
    size = len(arrays[0])
    count = min(count, size)
    chosen = np.arange(count) * size // count
    return [np.asarray(array[chosen]) for array in arrays]


def _logits(model: keras.Model, prepared: np.ndarray) -> np.ndarray:
    """Returns the logits of any number of images, a few at a time."""
    parts = [
        formats.logits(model, tf.constant(prepared[first : first + _IMAGES]))
        for first in range(0, len(prepared), _IMAGES)
    ]
    return np.concatenate(parts)


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


def _in_a_fresh_process(path: Path, file_format: str, images: np.ndarray) -> np.ndarray:
    """Returns what a process without this package's model computes."""
    np.save(path.with_name(child.IMAGES), images)
    output = child_process.run(
        child.__name__,
        file_format,
        str(path),
        seconds=_CHECK_SECONDS,
        **formats.NO_GPU,
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
