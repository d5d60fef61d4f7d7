"""`python -m cifar10 serve`."""

import argparse
from collections.abc import Sequence

from cifar10.config import flags
from cifar10.process import entry_point
from cifar10.tools import packages
from cifar10.tools.serve.options import Options

HELP = "answer over HTTP what is on images"
DESCRIPTION = """Answers over HTTP what is on images, by a run that may go on training.

    python -m cifar10 serve --train_dir runs/cifar10_train
    curl --data-binary @cat.png http://127.0.0.1:8000/predict
    curl -F image=@cat.png -F image=@dog.png http://127.0.0.1:8000/predict

POST /predict takes an image as `predict` does, of up to 12.5 megapixels, or
several in a form (?top_k=5 names five classes), GET /health tells the model
and the step and age of its weights, GET /metrics more of it for Prometheus,
and GET / explains all of these. Each new checkpoint is taken as it comes,
between two answers, or with --step best each better one; the training may
begin later. Without --host only this machine can ask; there are no passwords.
SIGTERM or Ctrl-C ends it after the answers that are under way.
"""


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    flags.add_flags(parser, Options)
    options = Options(**flags.parse(parser, words))
    packages.require("serve", "prometheus_client", "starlette", "uvicorn")
    entry_point.import_tensorflow()
    from cifar10.tools.serve import serving

    serving.run(options)
    return 0
