"""`python -m cifar10 serve`."""

from __future__ import annotations

import argparse
import functools
import importlib.util

from cifar10.config import cli, config
from cifar10.errors import UsageError

HELP = "answer over HTTP what is on images"
DESCRIPTION = """Answers over HTTP what is on images, by a run that may go on training.

    pip install -c constraints.txt -e '.[serve]'
    python -m cifar10 serve --train_dir /tmp/cifar10_train
    curl --data-binary @cat.png http://127.0.0.1:8000/predict

POST /predict takes a PNG or JPEG image of up to 12.5 megapixels (?top_k=5 names five
classes), GET /health tells the step and age of the weights, GET /metrics more of it for
Prometheus.
Each new checkpoint is taken as it comes, between two answers. Without --host only this
machine can ask; there are no passwords. SIGTERM or Ctrl-C ends it after the answers
that are under way.
"""

# Of the extra `serve`.
_PACKAGES = ("prometheus_client", "starlette", "uvicorn")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    flag = parser.add_argument
    switch = functools.partial(flag, action=argparse.BooleanOptionalAction)
    source = parser.add_mutually_exclusive_group()
    of_run = "directory of the run to follow"
    source.add_argument("--train_dir", default=config.TRAIN_DIR, help=of_run)
    exported = "folder of a SavedModel of python -m cifar10 export, instead of a run"
    source.add_argument("--savedmodel", help=exported)
    flag("--host", default="127.0.0.1", help="address to listen at")
    flag("--port", type=int, default=8000, help="port to listen at; 0 for a free one")
    looks = "seconds between two looks for a new checkpoint"
    flag("--interval_secs", type=float, default=1.0, help=looks)
    largest = "largest request, in millions of bytes"
    flag("--max_request_mb", type=float, default=10.0, help=largest)
    patience = "seconds that a client may take to send its request"
    flag("--timeout_secs", type=float, default=10.0, help=patience)
    waiting = "requests that may wait; further ones are told to come back"
    flag("--queue", type=int, default=64, help=waiting)
    averages = "use the variables' moving averages, not their last values"
    switch("--use_averages", default=True, help=averages)
    flag("--device", default="auto", help="device to use: auto, cpu, gpu or gpu:NUMBER")
    switch("--verbose", default=False, help="show TensorFlow's own start-up messages")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    missing = [one for one in _PACKAGES if importlib.util.find_spec(one) is None]
    if missing:
        raise UsageError(
            f"serve needs {', '.join(missing)}, which this Python does not have: "
            "pip install -c constraints.txt -e '.[serve]'"
        )
    flags = vars(arguments)
    cli.import_tensorflow(verbose=flags["verbose"])
    from cifar10.tools.serve import serving

    for name in ("run", "verbose"):
        del flags[name]
    serving.run(serving.Options(**flags))
    return 0
