"""Runs the HTTP service over a run that is followed, or over an exported model."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from collections.abc import Iterator

import uvicorn

from cifar10.errors import UsageError, reason
from cifar10.follower import Follower
from cifar10.run_directory import layout
from cifar10.tools.serve.exported import ExportedModel
from cifar10.tools.serve.impatient_http import ImpatientProtocol
from cifar10.tools.serve.options import Options
from cifar10.tools.serve.service import Copy, Limits, Service
from cifar10.towers import devices

# Connections beside those of the queue; the next ones are sent away. With the default
# limits, all of them with the largest bodies take 1.3 GB, and the four images that are
# decoded at a time 0.6 GB more.
_MORE_CONNECTIONS = 64
_SHUTDOWN_SECONDS = 10


def run(options: Options) -> None:
    """Serves until a signal ends it.

    Raises:
        UsageError: There is nothing to serve, or the address cannot be used.
    """
    device = devices.place_evaluation(options.device)
    with (
        listening(options.host, options.port) as listener,
        _opened(options, device) as copy,
    ):
        _tell(options, *listener.getsockname()[:2])
        server(copy, options).run([listener])


def _tell(options: Options, host: str, port: int) -> None:
    """Says what is served and where."""
    what = options.savedmodel or options.train_dir
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(
        f"Serving {what} at {url}\n  curl --data-binary @cat.png {url}/predict",
        flush=True,
    )
    if not ipaddress.ip_address(host).is_loopback:
        print(
            f"WARNING: --host {options.host}: whoever reaches port {port} of this "
            "machine can ask; the service knows no passwords.",
            file=sys.stderr,
            flush=True,
        )


def server(copy: Copy, options: Options) -> uvicorn.Server:
    """Returns the service over a copy of a model, ready to run on a listening socket.

    Args:
        copy: A follower or an exported model.
        options: The limits are taken from them.
    """
    limits = Limits(
        bytes=int(options.max_request_mb * 1_000_000),
        seconds=options.timeout_secs,
        waiting=options.queue,
    )
    return uvicorn.Server(
        uvicorn.Config(
            Service(copy, limits).application(),
            http=ImpatientProtocol,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=_MORE_CONNECTIONS + options.queue,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
    )


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listens at an address.

    Raises:
        UsageError: It cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"--host {host} --port {port}: nothing can be served there: "
            f"{reason(error)}. Another --port, or 0 for any that is free, may do."
        ) from error
    with listener:
        yield listener


@contextlib.contextmanager
def _opened(options: Options, device: str) -> Iterator[Copy]:
    """Opens what is to be served; a run without a checkpoint may get one later."""
    if options.savedmodel is not None:
        yield ExportedModel(layout.locate(options.savedmodel), device)
        return
    follower = Follower(options.train_dir, device, use_averages=options.use_averages)
    with follower.start(options.interval_secs):
        described = layout.description(follower.directory) is not None
        if follower.weights_step is None and (follower.refused or not described):
            raise UsageError(follower.why_no_weights())
        yield follower
