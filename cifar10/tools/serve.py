"""`python -m cifar10 serve`: classifies images over HTTP with the model of a run."""

import argparse
import contextlib
import dataclasses
import errno
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cifar10.config import flags, layout, run_options
from cifar10.config.options import Range
from cifar10.errors import UsageError, reason
from cifar10.process import entry_point, invocation
from cifar10.run_directory import restoring

if TYPE_CHECKING:
    from cifar10.follower import Follower

HELP = "classify images over HTTP"
DESCRIPTION = """Classifies images over HTTP with the model of a run.

    python -m cifar10 serve --train_dir runs/cifar10_train
    curl --data-binary @cat.png http://127.0.0.1:8000/predict

POST /predict classifies an image of up to 12.5 megapixels (?top_k=5 names five
classes). GET /health returns the model, and the step and age of its weights;
GET /metrics counts requests, images and seconds for Prometheus.
Each new checkpoint is loaded between two answers; with --step best, each better
one. There are no passwords: with --host 0.0.0.0, anyone who reaches the port can
use the service. SIGTERM or Ctrl-C ends it after the answers in progress.
"""

_LARGEST = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(run_options.RunOptions):
    """The options of `cifar10 serve`.

    Attributes:
        host: address to listen on; by default only this machine can send requests
        port: port to listen on; 0 for a free one
        interval_secs: seconds between checks for a new checkpoint
        max_request_mb: largest request, in millions of bytes
        timeout_secs: seconds that a client may take to send its request
        use_averages: use the variables' moving averages, not their last values
        device: device to use: auto, cpu or gpu
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 2**16 - 1)] = 8000
    interval_secs: run_options.Seconds = 1.0
    max_request_mb: Annotated[float, Range(1e-6, _LARGEST)] = 10.0
    timeout_secs: Annotated[float, Range(1e-3, _LARGEST)] = 10.0
    use_averages: bool = True
    device: run_options.Device = "auto"


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    flags.add_flags(parser, Options)
    options = Options(**flags.parse(parser, words))
    invocation.require_packages("serve", "starlette", "uvicorn")
    if (layout.absolute_path(options.train_dir) / layout.CONFIG).exists():
        restoring.check_usable(options.train_dir, options.trust_model)
    entry_point.import_tensorflow()
    serve_model(options)
    return 0


def serve_model(options: Options) -> None:
    """Serves the model of a run until a signal ends the program."""
    from cifar10.follower import Follower
    from cifar10.tools.service import Service
    from cifar10.towers import devices

    follower = Follower(
        options.train_dir,
        devices.place_evaluation(options.device),
        step=options.step,
        use_averages=options.use_averages,
        trust_model=options.trust_model,
    )
    with (
        listen(options.host, options.port) as listener,
        follower.start(options.interval_secs),
    ):
        if follower.weights_step is None and follower.refusals:
            raise UsageError(follower.why_no_weights)
        news = (follower, options.interval_secs)
        threading.Thread(target=_say_news, args=news, daemon=True).start()
        host, port = listener.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        print(f"Serving {options.train_dir} at http://{address}", flush=True)
        limits = int(options.max_request_mb * 1_000_000), options.timeout_secs
        with contextlib.closing(Service(follower, options.host, *limits)) as service:
            service.create_server().run([listener])


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on an address, or raises a `UsageError`."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except (OSError, TypeError) as error:  # A TypeError for an impossible name.
        is_of_port = getattr(error, "errno", 0) in (errno.EADDRINUSE, errno.EACCES)
        another = "--port, or 0" if is_of_port else "--host"
        raise UsageError(
            f"--host {host} --port {port}: {reason(error)}. Give another {another}."
        ) from error
    # Connections inherit this option, which asyncio does not set for this listener.
    # Without it, the body of an answer waits for the ACK of its headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _say_news(follower: "Follower", interval: float) -> None:
    """Says which step is served and what was refused; runs in a thread."""
    while not follower.closed.wait(interval):
        step = follower.weights_step
        serving = f"Serving step {step}."
        follower.say_news(follower.why_no_weights if step is None else serving)
