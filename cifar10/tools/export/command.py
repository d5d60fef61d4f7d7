"""`python -m cifar10 export`."""

import argparse
from collections.abc import Sequence

from cifar10.config import flags
from cifar10.process import entry_point
from cifar10.run_directory import restoring
from cifar10.tools.export.options import Options

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


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    flags.add_flags(parser, Options)
    options = Options(**flags.parse(parser, words))
    restoring.check(options.train_dir, options.step, options.trust_model)
    entry_point.import_tensorflow()
    from cifar10.tools.export import exporter

    return exporter.run(options)
