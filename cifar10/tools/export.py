"""`python -m cifar10 export`: exports a run's model, and names it once checked."""

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cifar10 import files
from cifar10.config import flags, layout, run_options
from cifar10.errors import UsageError, say
from cifar10.process import entry_point, invocation
from cifar10.process.moving_line import LINE
from cifar10.run_directory import restoring

HELP = "export the model of a run for other programs"
DESCRIPTION = """Exports the model of a run for other programs.

    python -m cifar10 export --output /tmp/cifar10_model
    python -m cifar10 export --output /tmp/cifar10_model.onnx
    python -m cifar10 export --output /tmp/cifar10_model.tflite

Writes a SavedModel folder, or a file that ends in .onnx, .keras or .tflite
(LiteRT). It takes images as evaluation prepares them and returns logits, both in
float32; with --with_preprocessing, it takes uint8 images of the data set's size
and returns probabilities. cifar10.json in it describes this. An export that
computes something other than the run's model on 256 test images is removed. Exit
code 0: written and checked; 1: the export differs; 2: a mistake that you can fix.
"""

# Packages that a format needs besides TensorFlow.
_PACKAGES = {"onnx": ("tf2onnx", "onnx", "onnxruntime"), "litert": ("ai_edge_litert",)}
_SUFFIXES = {".onnx": "onnx", ".keras": "keras", ".tflite": "litert"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(run_options.RunOptions):
    """What to export and where.

    Attributes:
        output: file that ends in .onnx, .keras or .tflite, else a SavedModel's folder
        with_preprocessing: let the model take uint8 images and return probabilities
        use_averages: use the variables' moving averages, not their last values
        data_dir: directory of the data set (default: the run's)
    """

    output: str
    with_preprocessing: bool = False
    use_averages: bool = True
    data_dir: str | None = None

    @property
    def file_format(self) -> str:
        """The format, by the extension of `output`."""
        ending = Path(self.output).suffix
        if not ending or ending.lstrip(".v").isdigit():  # A folder's version.
            return "savedmodel"
        if ending in _SUFFIXES:
            return _SUFFIXES[ending]
        raise UsageError(
            f"--output {self.output}: no export ends in {ending}. Use "
            f"{', '.join(_SUFFIXES)}, or no extension for a SavedModel's folder."
        )


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    flags.add_flags(parser, Options)
    options = Options(**flags.parse(parser, words))
    restoring.check_usable(options.train_dir, options.trust_model, options.step)
    entry_point.import_tensorflow()
    return export_run(options)


def export_run(options: Options) -> int:
    """Exports a model; returns the exit code, 1 if the export computes wrong values."""
    from cifar10.input import datasets
    from cifar10.tools import export_formats, exported
    from cifar10.towers import devices
    from cifar10.trained_model import TrainedModel

    file_format = options.file_format
    invocation.require_packages("export", *_PACKAGES.get(file_format, ()))
    output = layout.absolute_path(options.output)
    files.check_new(output, "--output")
    layout.refuse_own_folder(output, "--output")
    devices.place_evaluation("cpu")
    directory = layout.absolute_path(options.train_dir)
    trained = TrainedModel(
        directory, use_averages=options.use_averages, trust_model=options.trust_model
    )
    step = trained.restore(options.step)
    prepares = options.with_preprocessing
    description = export_formats.describe(trained, step, with_preprocessing=prepares)
    dataset = datasets.find_again(trained.run, options.data_dir)
    model = export_formats.in_float32(trained)
    images, expected = export_formats.examples(model, dataset, description)
    prefix = f".incomplete-{output.name}-"
    with files.writing(output, "--output"):
        with tempfile.TemporaryDirectory(prefix=prefix, dir=output.parent) as beside:
            path = Path(beside) / f"model{output.suffix}"
            LINE.show(f"Exporting, 1 of 2: converting to {file_format}")
            export_formats.write_model(model, path, file_format, description)
            for part in (path, *path.rglob("*")):
                files.sync(part)
            LINE.show(f"Exporting, 2 of 2: scoring {len(images):,} test images with it")
            computed = exported.compute_in_another_process(path, file_format, images)
            passed, finding = exported.compare(computed, expected)
            compared = f"On {len(images):,} test images, the export {finding}."
            if not passed:
                say(f"REFUSED: {compared} Nothing was written.")
                return 1
            # Another process may have created it meanwhile.
            files.check_new(output, "--output")
            path.rename(output)
        files.sync(output.parent)
    print(f"Exported step {step} to {output}.\n{compared}")
    return 0
