"""`python -m cifar10 export`: exports the model of a run, and checks the export.

The export is written under a temporary name, loaded in another process, compared with
the run's model on test images, and only then renamed. So an export under its final
name is complete and correct.
"""

import argparse
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from cifar10.config import flags, layout, run_options
from cifar10.config.data_flag import FINDABLE
from cifar10.errors import UsageError, reason, say
from cifar10.process import entry_point, files, invocation
from cifar10.run_directory import restoring

HELP = "export the model of a run for other programs"
DESCRIPTION = """Exports the model of a run for other programs.

    python -m cifar10 export --output /tmp/cifar10_model
    python -m cifar10 export --output /tmp/cifar10_model.onnx
    python -m cifar10 export --output /tmp/cifar10_model.keras
    python -m cifar10 export --output /tmp/cifar10_model.tflite
    python -m cifar10 export --output it.tflite --quantize int8

The export takes images as evaluation prepares them and returns logits, both in
float32, whatever the precision of the training run. With --with_preprocessing
it prepares uint8 images of any size itself and returns probabilities. The
export is loaded in a separate process and must compute the same as the run's
model on 256 test images (random images, if the run's data was in a program's
memory). Otherwise it is removed. With --quantize int8, weights and activations
are integers, whose ranges are estimated from 500 training images. The export
may then misclassify 1 % more of up to 10,000 test images than the run's model.
The preparation of images, the class names and the step are described in
cifar10.json in a SavedModel's folder, in the metadata of ONNX, or in the
cifar10.json that unzip extracts from a .keras or .tflite file. With
--model_card the folder can be pushed to Hugging Face's hub. Exit code 0:
written and checked; 1: the export computes something else; 2: a mistake that
you can fix. ONNX and LiteRT need the packages of the extra `export`. Programs
that load a .keras file need only Keras.
"""

# Packages that a format needs besides TensorFlow.
_PACKAGES = {"onnx": ("tf2onnx", "onnx", "onnxruntime"), "litert": ("ai_edge_litert",)}
_SUFFIXES = {".onnx": "onnx", ".keras": "keras", ".tflite": "litert"}
# Endings of unsupported formats. Other endings may be part of a folder's name.
_OTHERS = (".h5", ".hdf5", ".pb", ".pt", ".pth", ".ckpt", ".safetensors", ".zip")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(run_options.RunOptions):
    """What to export and where.

    Attributes:
        output: file that ends in .onnx, .keras or .tflite, or folder for a SavedModel
        with_preprocessing: let the model take uint8 images and return probabilities
        quantize: type of integers to compute in, for a .tflite file
        use_averages: use the variables' moving averages, not their last values
        data_dir: directory of the data set (default: the run's)
        model_card: write README.md, a model card for Hugging Face's hub, in the folder
            or beside the file; the checkpoint must have been scored
    """

    output: str
    with_preprocessing: bool = False
    quantize: Literal["none", "int8"] = "none"
    use_averages: bool = True
    data_dir: str | None = None
    model_card: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        ending = Path(self.output).suffix
        if ending not in _SUFFIXES and ending.lower() in {*_SUFFIXES, *_OTHERS}:
            raise UsageError(
                f"--output {self.output}: {ending} is not a supported format.\nUse "
                f"{', '.join(_SUFFIXES)}, or no ending for a SavedModel's folder."
            )
        is_float = self.file_format != "litert" or self.with_preprocessing
        if self.quantize != "none" and is_float:
            raise UsageError(
                f"--quantize {self.quantize} needs an --output that ends in .tflite, "
                "and excludes --with_preprocessing,\nbecause 8-bit integers are too "
                "coarse to prepare images. The export describes how to prepare them."
            )

    @property
    def file_format(self) -> str:
        """The format that the ending of `output` selects."""
        return _SUFFIXES.get(Path(self.output).suffix, "savedmodel")


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    flags.add_flags(parser, Options)
    options = Options(**flags.parse(parser, words))
    restoring.check_usable(options.train_dir, options.step, options.trust_model)
    entry_point.import_tensorflow()
    return export_run(options)


def export_run(options: Options) -> int:
    """Exports a model; returns the exit code, 1 if the export computes wrong values."""
    from cifar10.follower.trained_model import TrainedModel
    from cifar10.input import datasets
    from cifar10.tools import export_formats, exported, model_card
    from cifar10.towers import devices

    file_format = options.file_format
    invocation.require_packages("export", *_PACKAGES.get(file_format, ()))
    output = layout.absolute_path(options.output)
    _check_free(output)
    folder = output if file_format == "savedmodel" else output.parent
    card = folder / model_card.NAME
    if options.model_card:
        _check_free(card)
    devices.place_evaluation("cpu")
    directory = layout.locate_run(options.train_dir)
    trained = TrainedModel(
        directory, use_averages=options.use_averages, trust_model=options.trust_model
    )
    step = trained.restore(options.step)
    dataset, used = None, "random pixels"
    is_needed = options.quantize != "none" or options.data_dir
    if is_needed or trained.settings["data"] in FINDABLE:
        dataset = datasets.find_again(trained.settings, options.data_dir)
        used = dataset.description
    description = {
        **export_formats.describe(trained, options.with_preprocessing),
        "step": step,
        "use_averages": options.use_averages,
        "temperature": trained.temperature,
        "precision": "float32" if options.quantize == "none" else options.quantize,
    }
    text = ""
    if options.model_card:
        named = output.name, file_format
        is_best = options.step == restoring.BEST
        text = model_card.build(directory, *named, description, is_best=is_best)
    print(
        f"Model:  {description['model']}, step {step} of {directory},\n"
        f"        {'averaged' if options.use_averages else 'raw'} variables; trained "
        f"in {description['trained_precision']}, "
        f"exported in {description['precision']}",
        flush=True,
    )
    model = export_formats.in_float32(trained)
    images, expected, labels = export_formats.examples(model, dataset, description)
    samples = None
    if dataset and options.quantize != "none":
        distortions = description["distortions"]
        samples = export_formats.calibration_images(dataset, distortions)
    with _temporary(output) as beside:
        path = beside / f"model{output.suffix}"
        export_formats.write_model(model, path, file_format, description, samples)
        for part in (path, *path.rglob("*")):
            files.sync(part)
        computed = exported.compute_in_another_process(path, file_format, images)
        passed, finding = export_formats.compare(
            computed, expected, labels, description["precision"]
        )
        compared = (
            f"on {len(images):,} test images of {used}\n"
            f"        the export, in another process, {finding}"
        )
        if not passed:
            say(f"REFUSED: {compared}. Nothing was written.")
            return 1
        _check_free(output)  # Another process may have created it meanwhile.
        files.rename(path, output)
        if text:
            files.write_atomically(card, text.encode())
        files.sync(output.parent)
    print(f"Check:  {compared}\nDone:   {output}")
    return 0


@contextlib.contextmanager
def _temporary(output: Path) -> Iterator[Path]:
    """Yields a temporary folder beside the output, and removes it afterwards."""
    import tensorflow as tf

    prefix = f".incomplete-{output.name}-"
    try:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=output.parent) as folder:
            yield Path(folder)
    except (OSError, tf.errors.OpError) as error:
        raise UsageError(
            f"--output {output} cannot be written: {reason(error)}. No file remains.\n"
            f"Create {output.parent}, make it writable, free space there, or give "
            "another --output."
        ) from error


def _check_free(output: Path) -> None:
    if os.path.lexists(output):
        raise UsageError(
            f"--output {output} exists already and is not overwritten.\nMove it away, "
            "or give another --output."
        )
