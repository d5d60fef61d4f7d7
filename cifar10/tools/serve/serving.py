"""Runs the HTTP service over a run that it follows, or over an exported model."""

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn

from cifar10.config import paths
from cifar10.errors import UsageError, reason, say
from cifar10.follower import Follower
from cifar10.tools.serve.exported import ExportedModel
from cifar10.tools.serve.options import Options
from cifar10.tools.serve.service import Service
from cifar10.towers import devices

# Time for the answers under way after SIGTERM. Containers are killed after 10 s, and
# what is then being decoded may use up the time that it has.
_SHUTDOWN_SECONDS = 7


def run(options: Options) -> None:
    """Serves until a signal ends it."""
    device = devices.place_evaluation(options.device)
    with (
        listening(options.host, options.port) as listener,
        _opened(options, device) as model,
    ):
        _announce(options, *listener.getsockname()[:2])
        if isinstance(model, Follower) and model.weights_step is None:
            waiting = (model, options.interval_secs)
            threading.Thread(
                target=_announce_weights, args=waiting, daemon=True
            ).start()
        server(model, options).run([listener])


def _announce_weights(model: Follower, interval: float) -> None:
    """Says when there is something to serve, or why not yet; runs in a thread."""
    said = ""
    while model.weights_step is None:
        if (why := model.why_no_weights()) != said:
            said = why
            say(f"{why}\nLooking every {interval:g} s.")
        time.sleep(interval)
    say(f"Serving step {model.weights_step}.")


def _announce(options: Options, host: str, port: int) -> None:
    source = options.savedmodel or options.train_dir
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(
        f"Serving {source} at {url}\n"
        f"  curl {url}  # explains all that it answers\n"
        f"  curl --data-binary @cat.png {url}/predict",
        flush=True,
    )
    if not ipaddress.ip_address(host).is_loopback:
        say(
            f"WARNING: --host {options.host}: anyone who can reach port {port} of this "
            "machine can use the service.\nPut a reverse proxy before it that asks for "
            "passwords and limits the connections of each client."
        )


def server(model: Follower | ExportedModel, options: Options) -> uvicorn.Server:
    """Returns the service over a model, ready to run on a listening socket."""
    # No `limit_concurrency`: it counts connections, so that idle clients alone would
    # exhaust it. The service limits bodies and predictions instead.
    return uvicorn.Server(
        uvicorn.Config(
            Service(model, options).application(),
            http="h11",
            ws="none",
            lifespan="off",
            # The process logs already; a second set-up would close absl's stream.
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
    )


def listening(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address."""
    try:
        host.encode("idna")  # What cannot be one is a TypeError of sockets.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"--host {host} --port {port}: cannot listen there: {reason(error)}.\n"
            "Choose another --port, or 0 for any free one."
        ) from error


@contextlib.contextmanager
def _opened(options: Options, device: str) -> Iterator[Follower | ExportedModel]:
    """Yields the model to serve; the run and its first checkpoint may come later."""
    if options.savedmodel is not None:
        yield ExportedModel(paths.locate(options.savedmodel), device)
        return
    follower = Follower(
        options.train_dir,
        device,
        use_averages=options.use_averages,
        trust_model=options.trust_model,
    )
    with follower.start(options.interval_secs):
        if follower.weights_step is None and follower.refused:
            raise UsageError(follower.why_no_weights())
        yield follower
