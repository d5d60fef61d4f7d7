"""The HTTP service of a model: predictions, health, metrics, and a help page.

The service withstands misbehaving clients. It drops bodies that are too large, refuses
requests that arrive too slowly or while the queue is full, and closes stalled
connections to make room for new ones. Pages of other web sites cannot use the service.
Images are decoded and classified in threads, so no request blocks another.
"""

import asyncio
import functools
import ipaddress
import math
import re
import resource
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import uvicorn
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cifar10.errors import UsageError, say
from cifar10.follower import Follower
from cifar10.input.pictures.decoding import NoPictureError
from cifar10.tools.classification import (
    Decoder,
    NotFiniteError,
    TooCostlyError,
    likeliest_classes,
)

if TYPE_CHECKING:
    from cifar10.tools.serve import Options

# A phone camera's resolution. A thread needs 12 bytes per pixel to decode an image.
MAX_PIXELS = 12_500_000
# With four threads, a picture seldom waits for slow ones. Each thread has a process for
# decoding. TensorFlow divides the work of predictions itself.
_THREADS = 4
# The largest images take a third of this time; see `Decoder`.
_DECODING_SECONDS = 1.0
_MAX_CONNECTIONS = 2_000  # Far more than one model can answer.
# Open files of TensorFlow, the run and the decoding processes: about 50 are in use.
_OTHER_FILES = 128
# Seconds after SIGTERM to finish answers, including the time to decode a picture.
# Containers are killed after 10 s.
_SHUTDOWN_SECONDS = 7
# Clients do not get the full reason, which names paths of this machine.
_NO_WEIGHTS = "No checkpoint can be used yet. The service's console says why."
_HOW_TO_SEND = "Send the file's bytes: curl --data-binary @cat.png"
_RETRY = {"Retry-After": "1"}
_METRICS_TYPE = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
# A name or an address, and a port. `urlsplit` would also accept a path.
_HOST = re.compile(r"(\[([^\[\]]+)\]|([^\[\]:]+))(:[0-9]*)?", re.ASCII)
_HELP_PAGE = """\
POST /predict: the likeliest classes of an image. ?top_k=5 names five classes.
  curl --data-binary @cat.png {url}predict
An image may have up to {size:,} bytes and {pixels:,} pixels.

GET /health: the model, and the step and age of its weights.
  curl {url}health

GET /metrics: the same for Prometheus, and counts of the answers.
  curl {url}metrics
"""
_STATE_HELP = {
    "weights_step": "Training step of the weights in use.",
    "age_seconds": "Seconds since the training saved these weights.",
    "refused_total": "Refused checkpoints.",
    "waiting": "Prediction requests that are in progress or waiting.",
}


class Service(Collector):
    """Answers HTTP requests with a model, whose weights may change at any time.

    After connecting, and after each answer, a client has `options.timeout_secs` to send
    a request's headers, and then as long again to send the body.
    """

    def __init__(self, model: Follower, options: "Options") -> None:
        self._model = model
        self._max_bytes = int(options.max_request_mb * 1_000_000)
        self._timeout = options.timeout_secs
        self._queue = options.queue
        self._waiting = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="predict")
        self._decoder = Decoder(_DECODING_SECONDS, MAX_PIXELS)
        self._metrics = CollectorRegistry()
        self._metrics.register(self)
        self._answers = Counter(
            "cifar10_answers",
            "Answers to prediction requests.",
            ["status"],
            registry=self._metrics,
        )
        self._seconds = Histogram(
            "cifar10_answer_seconds",
            "Seconds from a request's headers to its answer.",
            registry=self._metrics,
        )
        self._application = Starlette(
            middleware=[Middleware(_Guard, host=options.host)],
            routes=[
                Route("/", self._explain, methods=["GET"]),
                Route("/predict", self._predict, methods=["POST"]),
                Route("/health", self._show_health, methods=["GET"]),
                Route("/metrics", self._show_metrics, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _show_error},
        )

    def create_server(self) -> uvicorn.Server:
        """Returns the HTTP server, ready to run on a listening socket."""

        async def end_idle() -> None:
            oldest = time.monotonic() - self._timeout
            connections: list[Any] = [*server.server_state.connections]
            for connection in connections:
                if connection.is_idle() and connection.waits_since < oldest:
                    connection.end()

        server = uvicorn.Server(
            uvicorn.Config(
                self._application,
                loop="asyncio",  # uvloop accepts any number of connections at a time.
                http=_Connection,
                # asyncio accepts this many connections at a time, and up to four times
                # as many before `connection_made` of the first one can close some.
                backlog=connection_limit() // 4,
                timeout_keep_alive=math.ceil(self._timeout),
                callback_notify=end_idle,
                timeout_notify=0,  # uvicorn then calls `end_idle` once a second.
                ws="none",
                lifespan="off",
                # Logging is set up already; uvicorn's set-up would close absl's stream.
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            )
        )
        return server

    async def _predict(self, request: Request) -> Response:
        """Answers a prediction request, and counts and times it even if it fails."""
        began = time.perf_counter()
        response = Response(status_code=500)  # Starlette's for any other exception.
        try:
            response = _Json(await self._answer(request))
        except HTTPException as error:
            response = await _show_error(request, error)
        except ClientDisconnect:  # Counted, although nobody receives the answer.
            response = Response(status_code=400)
        except asyncio.CancelledError:  # By uvicorn, after `_SHUTDOWN_SECONDS`.
            response = _Json({"error": "The service is shutting down."}, 503)
        finally:
            self._answers.labels(str(response.status_code)).inc()
            self._seconds.observe(time.perf_counter() - began)
        return response

    async def _answer(self, request: Request) -> dict[str, Any]:
        if self._waiting >= self._queue:
            message = f"{self._waiting} requests are waiting already. Try again later."
            raise HTTPException(503, message, _RETRY)
        self._waiting += 1
        try:
            body = await self._receive(request)
            kind = request.headers.get("content-type", "")
            if kind.lower().startswith("multipart/"):
                raise HTTPException(415, f"The request is a form. {_HOW_TO_SEND}")
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, self._predict_image, body, _requested_top_k(request)
            )
        finally:
            self._waiting -= 1

    async def _receive(self, request: Request) -> bytes:
        """Returns a request's body, within the limits on time and size."""
        # A body that is too large is read to its end, because closing a connection with
        # unread data could destroy the answer before the client reads it.
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(self._timeout):
                async for chunk in request.stream():
                    size += len(chunk)
                    body += chunk[: max(0, self._max_bytes - len(body))]
        except TimeoutError as error:
            if size <= self._max_bytes:
                why = f"The request did not arrive within {self._timeout:g} seconds."
                raise HTTPException(408, why, {"Connection": "close"}) from error
        if size > self._max_bytes:
            why = f"A request may have {self._max_bytes:,} bytes at most."
            raise HTTPException(413, why)
        return bytes(body)

    def _predict_image(self, body: bytes, top_k: int | None) -> dict[str, Any]:
        """Decodes and classifies an image; runs in a thread."""
        if self._model.weights_step is None:
            raise HTTPException(503, _NO_WEIGHTS, _RETRY)
        try:
            name, shape = "The request's body", self._model.image_shape
            image = self._decoder.decode(body, name, shape)
            step, logits, class_names = self._model.predict(image[None])
            (ranked,) = likeliest_classes(logits, class_names, top_k)
        except UsageError as error:
            statuses = {TooCostlyError: 422, NotFiniteError: 500}
            why = str(error)
            if isinstance(error, NoPictureError):
                why += f" {_HOW_TO_SEND}"
            raise HTTPException(statuses.get(type(error), 400), why) from error
        return {"step": step, "predictions": ranked}

    async def _explain(self, request: Request) -> Response:
        page = _HELP_PAGE.format(
            url=request.base_url, size=self._max_bytes, pixels=MAX_PIXELS
        )
        return PlainTextResponse(page)

    async def _show_health(self, _request: Request) -> Response:
        if self._model.weights_step is None:
            return _Json({"error": _NO_WEIGHTS}, 503)
        return _Json({**self._model.names, **self._state()})

    async def _show_metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self._metrics), headers=_METRICS_TYPE)

    def collect(self) -> Iterable[Metric]:
        """Yields the state of the model and the queue as metrics for Prometheus."""
        for name, value in self._state().items():
            if value is not None:
                is_counter = name.endswith("_total")
                family = CounterMetricFamily if is_counter else GaugeMetricFamily
                yield family(f"cifar10_{name}", _STATE_HELP[name], value=value)

    def _state(self) -> dict[str, float | None]:
        return {
            "weights_step": self._model.weights_step,
            "age_seconds": self._model.age_seconds,
            "refused_total": len(self._model.refusals),
            "waiting": self._waiting,
        }


class _Json(JSONResponse):
    """A JSON response with a newline at its end, for terminals."""

    def render(self, content: Any) -> bytes:
        return super().render(content) + b"\n"


async def _show_error(_request: Request, error: Any) -> Response:
    return _Json({"error": error.detail}, error.status_code, error.headers)


def _requested_top_k(request: Request) -> int | None:
    if (text := request.query_params.get("top_k")) is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise HTTPException(400, f"top_k {text[:20]}: give a number of classes.")
    return int(text)


class _Guard:
    """ASGI middleware that keeps the pages of other web sites from using the service.

    A page can make its visitor's browser send requests to any address. The page can
    also read the answers if its domain name points at that address. So a request is
    answered only if its Host header is an IP address or a name of this machine.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        names = ("localhost", host, socket.gethostname(), socket.getfqdn(host))
        self._names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request, or passes it on to the application."""
        app = self._app
        if refused := self._refusal(Headers(scope=scope), scope["method"]):
            status, error = refused
            app = _Json({"error": error}, status, {"Connection": "close"})
        await app(scope, receive, send)

    def _refusal(self, headers: Headers, method: str) -> tuple[int, str] | None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may use the other header, and see two requests in one.
            return 400, "Content-Length and Transfer-Encoding exclude each other."
        if not self._is_own(headers.get("host", "localhost")):
            return 421, "The service has another name. Use its machine's IP address."
        if _is_of_another_site(headers, method):
            return 403, "Pages of other web sites may not use the service."
        return None

    def _is_own(self, host: str) -> bool:
        # All IP addresses are accepted: nobody can redirect an address, and a container
        # does not know its own. Starlette's TrustedHostMiddleware takes only names.
        if not (found := _HOST.fullmatch(host.lower())):
            return False
        try:
            name = found[2] or found[3]
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _is_of_another_site(headers: Headers, method: str) -> bool:
    if method == "GET" and headers.get("sec-fetch-mode") == "navigate":
        return False  # The user follows a link.
    if site := headers.get("sec-fetch-site"):
        return site not in ("same-origin", "none")
    # To addresses that are neither local nor HTTPS, browsers send only Origin. Other
    # programs send neither header.
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


def connection_limit() -> int:
    """Returns how many connections may be open: half of the limit on open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(8, min(_MAX_CONNECTIONS, (files - _OTHER_FILES) // 2))


class _Connection(H11Protocol):
    """A connection that may be closed while it waits for its client.

    If there are too many connections, a new one closes those that have waited longest
    for their clients. A request that has arrived is always answered.
    """

    waits_since = 0.0  # Monotonic time of its opening or its last answer.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Closes stalled connections if there are too many connections."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.waits_since = time.monotonic()
        if len(self.connections) >= connection_limit():
            self._make_room()

    def on_response_complete(self) -> None:
        """Records when the wait for the next request begins."""
        self.waits_since = time.monotonic()
        super().on_response_complete()

    def is_idle(self) -> bool:
        """Returns whether the connection waits for a request's headers."""
        return self.cycle is None or self.cycle.response_complete

    def is_stalled(self) -> bool:
        """Returns whether the connection waits for its client, not for the service."""
        return self.is_idle() or self.cycle.more_body or self.flow.write_paused

    def end(self) -> None:
        """Closes the connection, even if its client has not read everything."""
        self.connections.discard(self)  # `connection_lost` comes later.
        self.transport.abort()

    def _make_room(self) -> None:
        _warn_once()
        connections: list[Any] = [*self.connections]
        stalled = [each for each in connections if each.is_stalled()]
        stalled.sort(key=lambda each: each.waits_since)
        # Closes several at a time, because the search takes long.
        for connection in stalled[: 1 + len(stalled) // 8]:
            connection.end()


@functools.cache
def _warn_once() -> None:
    say(
        f"There are {connection_limit()} connections, the maximum. Those that have "
        "waited longest for their clients are closed."
    )
