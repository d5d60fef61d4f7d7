"""`python -m cifar10 export`: writes the model of a run, and checks what was written.

The export is written under a temporary name, loaded in another process, compared with
the run's own model on test images, and only then renamed. So whatever exists under its
final name is complete and correct.
"""

import argparse
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar10.config import flags, layout, shared_options
from cifar10.config.options import check, option
from cifar10.errors import UsageError, reason, say
from cifar10.process import entry_point, files, invocation
from cifar10.run_directory import restoring
from cifar10.tools import child_process

if TYPE_CHECKING:
    import keras
    import numpy as np

    from cifar10.follower.trained_model import TrainedModel
    from cifar10.input.datasets import Dataset

HELP = "write the model of a run for other programs"
DESCRIPTION = """Writes the model of a run for other programs.

    python -m cifar10 export --format savedmodel --output /tmp/cifar10_model
    python -m cifar10 export --format onnx --output /tmp/cifar10_model.onnx
    python -m cifar10 export --format keras --output /tmp/cifar10_model.keras
    python -m cifar10 export --format litert --output /tmp/cifar10_model.tflite
    python -m cifar10 export --format litert --quantize int8 --output it.tflite

The model takes images as evaluation prepares them and returns logits, both
float32, whatever precision the run was trained in. With --with_preprocessing it
prepares uint8 images of any size itself and returns probabilities. The result
is loaded in a process of its own and has to compute the same on 256 test
images, or nothing is left of it. A .keras file needs Keras alone.
With --quantize int8 weights and activations are integers, whose ranges come
from 500 training images; up to 10,000 test images are classified, and int8 may
lose 1 % of them. What the model is (how images are prepared, class names, step)
is in a SavedModel's cifar10.json, in the metadata of ONNX, and for unzip in the
cifar10.json of a .keras or .tflite file. Exit code 0: written and checked;
1: it computes otherwise; 2: a mistake that you can fix. ONNX and LiteRT need
the packages of the extra `export`.
"""

# Test images on which the exported model has to agree with the run's. In float32 the
# largest difference, relative to the largest value, may be this: summing in another
# order stays below a third of it.
_IMAGES = 256
_TOLERANCE = 1e-5
# With --quantize: test images to classify, at most, and training images from which the
# ranges of the activations are estimated; TensorFlow's guide says 100 to 500. Int8
# loses less than a point where these were estimated well
# (https://arxiv.org/abs/2004.09602).
_CLASSIFIED = 10_000
_SAMPLES = 500
_MOST_LOST = 0.01
# How long the export may take to compute them.
_CHECK_SECONDS = 3600.0
# What the formats need besides TensorFlow.
_PACKAGES = {
    "onnx": ("tf2onnx", "onnx", "onnxruntime"),
    "litert": ("ai_edge_litert",),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to export and where; see each field's help."""

    train_dir: str = shared_options.train_dir()
    format: str = option(
        "savedmodel",
        "what to write",
        choices=("savedmodel", "onnx", "keras", "litert"),
    )
    output: str = option(
        dataclasses.MISSING, "folder (savedmodel) or file (others) to make"
    )
    step: str | None = shared_options.step()
    with_preprocessing: bool = option(False, "take uint8 images, give probabilities")
    quantize: str = option(
        "none", "litert: compute in integers", choices=("none", "int8")
    )
    use_averages: bool = shared_options.use_averages()
    trust_model: str | None = shared_options.trust_model()
    data_dir: str | None = shared_options.data_dir()

    def __post_init__(self) -> None:
        check(self)
        if self.format == "keras" and not self.output.endswith(".keras"):
            raise UsageError(
                f"--output {self.output}: Keras opens only files whose names end in "
                f".keras.\nGive --output {self.output}.keras."
            )
        if self.quantize == "none":
            return
        if self.format != "litert":
            raise UsageError(
                f"--quantize {self.quantize}: --format {self.format} is written in "
                "float32.\nAdd --format litert, or leave --quantize out."
            )
        if self.with_preprocessing:
            raise UsageError(
                f"--quantize {self.quantize} --with_preprocessing: integers of 8 bits "
                "are too coarse to resize and standardize images.\nLeave one of them "
                "out; without --with_preprocessing the description says how to prepare "
                "images."
            )


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    flags.add_flags(parser, Options)
    options = Options(**flags.parse(parser, words))
    restoring.check(options.train_dir, options.step, options.trust_model)
    entry_point.import_tensorflow()
    return export_run(options)


def export_run(options: Options) -> int:
    """Exports a model; returns the exit code, 1 if the export computes differently."""
    from cifar10.follower.trained_model import TrainedModel
    from cifar10.input import datasets
    from cifar10.tools.export_formats import write_model
    from cifar10.towers import devices

    invocation.require_packages("export", *_PACKAGES.get(options.format, ()))
    output = layout.absolute_path(options.output)
    _check_free(output)
    devices.place_evaluation("cpu")
    directory = layout.locate_run(options.train_dir)
    trained = TrainedModel(
        directory, use_averages=options.use_averages, trust_model=options.trust_model
    )
    step = trained.restore(options.step)
    dataset = datasets.find_again(trained.settings, options.data_dir)
    description = _describe(trained, dataset, step, options)
    print(
        f"Model:  {description['model']}, step {step} of {directory},\n"
        f"        {'averaged' if options.use_averages else 'raw'} variables; trained "
        f"in {description['trained_precision']}, "
        f"exported in {description['precision']}",
        flush=True,
    )
    model = _in_float32(trained)
    is_quantized = options.quantize != "none"
    test_images, test_labels = dataset.read("test")
    count = _CLASSIFIED if is_quantized else _IMAGES
    images, labels = _spread(test_images, test_labels, count=count)
    images, expected = _expected(model, images, description)
    samples = None
    if is_quantized:
        (samples,) = _spread(dataset.read("train")[0], count=_SAMPLES)
        samples = _prepared(samples, description)
    with _temporary(output, options.format) as path:
        write_model(model, path, options.format, description, samples)
        for part in (path, *path.rglob("*")):
            files.sync(part)
        computed = _in_another_process(path, options.format, images)
        if is_quantized:
            passed, finding = compare_precisions(computed, expected, labels)
        else:
            passed, finding = compare_values(computed, expected)
        compared = (
            f"on {len(images):,} test images of {dataset.description}\n"
            f"        the export, in another process, {finding}"
        )
        if not passed:
            say(f"REFUSED: {compared}. Nothing was written.")
            return 1
        _check_free(output)  # Another process may have created it meanwhile.
        files.rename(path, output)
        files.sync(output.parent)
    place = "metadata" if options.format == "onnx" else "cifar10.json"
    given, result = description["input"], description["output"]
    print(
        f"Check:  {compared}\n"
        f"Done:   {output}\n"
        f"        from {given['dtype']} {given['shape']}, as its {place} describes,\n"
        f"        to {result['name']}, float32 {result['shape']}"
    )
    return 0


def _describe(
    trained: "TrainedModel", dataset: "Dataset", step: int, options: Options
) -> dict[str, Any]:
    """Returns what the export says of itself, as JSON values."""
    from cifar10.tools import preparation

    settings = trained.settings
    given = {"dtype": "float32", "shape": [None, *trained.image_shape]}
    if options.with_preprocessing:
        given = {
            "dtype": "uint8",
            "shape": [None, None, None, trained.picture_shape[-1]],
        }
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
        "step": step,
        "use_averages": options.use_averages,
        "precision": "float32" if options.quantize == "none" else options.quantize,
        "with_preprocessing": options.with_preprocessing,
        "input": {"name": "images", **given},
        "output": {
            "name": "probabilities" if options.with_preprocessing else "logits",
            "dtype": "float32",
            "shape": [None, trained.classes],
        },
    }


def _in_float32(trained: "TrainedModel") -> "keras.Model":
    """Returns the run's model in float32, with the values that it uses.

    The converters support no other precision.
    """
    import tensorflow as tf

    from cifar10 import model as models

    model = models.build(
        trained.settings["model"],
        trained.image_shape,
        trained.classes,
        precision="float32",
        options=trained.options,
    )
    variables = model.trainable_variables + model.non_trainable_variables
    values = [*trained.trainable, *trained.non_trainable]
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))
    return model


def _expected(
    model: "keras.Model", images: "np.ndarray", description: Mapping[str, Any]
) -> tuple["np.ndarray", "np.ndarray"]:
    """Returns images as the export takes them, and what it has to compute from them."""
    import numpy as np
    import tensorflow as tf

    prepared = _prepared(images, description)
    parts = range(0, len(prepared), _IMAGES)
    logits = [
        tf.cast(model(prepared[first : first + _IMAGES], training=False), tf.float32)
        for first in parts
    ]
    expected = np.concatenate(logits)
    if description["with_preprocessing"]:
        return images, tf.nn.softmax(expected).numpy()
    return prepared, expected


def _prepared(images: "np.ndarray", description: Mapping[str, Any]) -> "np.ndarray":
    import tensorflow as tf

    from cifar10.input import pipeline

    return pipeline.prepare(tf.constant(images), description["distortions"]).numpy()


def _spread(*arrays: Any, count: int) -> list["np.ndarray"]:
    """Returns rows from all parts of arrays: in a folder the first are of one class."""
    import numpy as np

    size = len(arrays[0])
    count = min(count, size)
    chosen = np.arange(count) * size // count
    return [np.asarray(array[chosen]) for array in arrays]


def compare_values(computed: "np.ndarray", expected: "np.ndarray") -> tuple[bool, str]:
    """Returns whether float32 [images, classes] differ by rounding alone, in words."""
    import numpy as np

    difference = float("inf")
    if computed.shape == expected.shape:
        difference = float(np.abs(computed - expected).max() / np.abs(expected).max())
    passed = difference <= _TOLERANCE  # False for NaN.
    return passed, (
        f"differs by\n        {difference:.1e} of the largest value "
        f"(at most {_TOLERANCE:.0e})"
    )


def compare_precisions(
    computed: "np.ndarray", expected: "np.ndarray", labels: "np.ndarray"
) -> tuple[bool, str]:
    """Returns whether int8 classifies nearly as many images correctly, in words.

    Args:
        computed: Logits in int8, float32 [images, classes].
        expected: Logits in float32.
        labels: integers [images].
    """
    import numpy as np

    ours = int(np.count_nonzero(expected.argmax(axis=1) == labels))
    correct, is_finite = 0, computed.shape == expected.shape
    if is_finite:
        correct = int(np.count_nonzero(computed.argmax(axis=1) == labels))
        is_finite = bool(np.isfinite(computed).all())
    most = max(1, int(_MOST_LOST * len(labels)))
    return is_finite and ours - correct <= most, (
        f"has\n        precision @ 1 = {correct / len(labels):.4f} in int8, and the "
        f"run's model\n        {ours / len(labels):.4f} in float32 (int8 may lose "
        f"{most:,} images)"
    )


def _in_another_process(
    path: Path, file_format: str, images: "np.ndarray"
) -> "np.ndarray":
    """Returns what the export computes in a process without this package's models."""
    import numpy as np

    from cifar10.tools import exported
    from cifar10.tools.export_formats import unusable

    np.save(path.with_name(exported.IMAGES), images)
    output = child_process.run(
        exported.__name__,
        file_format,
        str(path),
        seconds=_CHECK_SECONDS,
        # A GPU rounds to TF32, and its memory may be a training's.
        CUDA_VISIBLE_DEVICES="-1",
    )
    if output.error:
        raise unusable(file_format, output.error)
    return np.load(path.with_name(exported.OUTPUTS))


@contextlib.contextmanager
def _temporary(output: Path, file_format: str) -> Iterator[Path]:
    """Yields where to write; nothing is left there."""
    import tensorflow as tf

    from cifar10.tools.export_formats import SUFFIXES

    prefix = f".incomplete-{output.name}-"
    try:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=output.parent) as folder:
            yield Path(folder) / f"model{SUFFIXES[file_format]}"
    except (OSError, tf.errors.OpError) as error:
        raise UsageError(
            f"--output {output} cannot be written: {reason(error)}. Nothing was left.\n"
            "Free space there and make the folder writable, or name another place."
        ) from error


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
