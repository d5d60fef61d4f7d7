"""Runs the HTTP service over a run that it follows, or over an exported model."""

import contextlib
import ipaddress
import math
import multiprocessing
import socket
import threading
from collections.abc import Iterator

import uvicorn

from cifar10.config import layout
from cifar10.errors import UsageError, reason, say
from cifar10.follower import Follower
from cifar10.tools.serve import connection
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
        ends = threading.Event()
        if isinstance(model, Follower):
            arguments = (model, options.interval_secs, ends)
            threading.Thread(
                target=_announce_weights, args=arguments, daemon=True
            ).start()
        try:
            server(model, options).run([listener])
        finally:
            ends.set()
            # Python would wait for decoders, whose answers nobody gets any more.
            for decoder in multiprocessing.active_children():
                decoder.kill()


def _announce_weights(model: Follower, interval: float, ends: threading.Event) -> None:
    """Says what is served or why nothing is, and what is refused; runs in a thread."""
    said = ""
    while model.weights_step is None:
        if (why := model.why_no_weights()) != said:
            said = why
            say(f"{why}\nLooking every {interval:g} s.")
        if ends.wait(interval):
            return
    say(f"Serving step {model.weights_step}.")
    count = 0
    while not ends.is_set():
        for refusal in model.refusals[count:]:
            count += 1
            if refusal not in said:
                say(f"{refusal}\nStep {model.weights_step} is served meanwhile.")
        ends.wait(interval)


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
    most, at_a_time = connection.limits()
    return uvicorn.Server(
        uvicorn.Config(
            Service(model, options).application(),
            loop="asyncio",  # uvloop takes any number of connections at a time.
            http=connection.Connection,
            limit_concurrency=most,
            backlog=at_a_time,
            timeout_keep_alive=math.ceil(options.timeout_secs),
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
        listener = socket.create_server((host, port), family=family)
        # Inherited by each connection. asyncio sets it only where the listener's
        # protocol is spelt out, and an answer's body would wait for the head's receipt.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener  # noqa: TRY300
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"--host {host} --port {port}: cannot listen there: {reason(error)}.\n"
            "Choose another --port, or 0 for any free one."
        ) from error


@contextlib.contextmanager
def _opened(options: Options, device: str) -> Iterator[Follower | ExportedModel]:
    """Yields the model to serve; the run and its first checkpoint may come later."""
    if options.savedmodel is not None:
        yield ExportedModel(layout.absolute_path(options.savedmodel), device)
        return
    follower = Follower(
        options.train_dir,
        device,
        step=options.step,
        use_averages=options.use_averages,
        trust_model=options.trust_model,
    )
    with follower.start(options.interval_secs):
        if follower.weights_step is None and follower.refused:
            raise UsageError(follower.why_no_weights())
        yield follower
