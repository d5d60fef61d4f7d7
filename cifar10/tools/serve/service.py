"""The HTTP service over a model: help, predict, health, metrics.

It withstands misbehaving clients: a body that is too large is not read, a body that
arrives too slowly is refused, and a request that finds the queue full is refused at
once. Images are decoded and predicted in threads, so no request blocks another.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from cifar10.errors import UsageError
from cifar10.follower import Follower
from cifar10.tools.predict import top_k as ranking
from cifar10.tools.predict.decoder import Decoder, TooCostlyError
from cifar10.tools.serve import form, help_page
from cifar10.tools.serve.exported import ExportedModel
from cifar10.tools.serve.guard import Guard
from cifar10.tools.serve.options import Options
from cifar10.tools.serve.service_metrics import ServiceMetrics

# A phone camera's resolution; each thread may decode an image of 12 bytes per pixel.
MAX_PIXELS = 12_500_000
MAX_IMAGES = 32  # In one request; they are predicted together.
# Bodies that are received at a time, which bounds the memory that they take. Idle
# connections do not count.
_RECEIVING = 64
# Enough that a picture seldom waits for others that take long. Each thread has a
# process for decoding; TensorFlow divides the work of predictions itself.
_THREADS = 4
# The largest images take a third of it; see `Decoder`.
_DECODING_SECONDS = 1.0
# The full reason names paths of this machine, which are not for clients.
_NO_WEIGHTS = "There is no checkpoint to use yet; the service's console says why."
_RETRY = {"Retry-After": "1"}
_METRICS_TYPE = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


class Service:
    """Answers requests from a model, which may change its weights at any time."""

    def __init__(self, model: Follower | ExportedModel, options: Options) -> None:
        self._model = model
        self._options = options
        self._max_bytes = int(options.max_request_mb * 1_000_000)
        self._receiving = asyncio.Semaphore(_RECEIVING)
        self._waiting = 0
        self._metrics = ServiceMetrics(self._state)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="predict")
        self._decoder = Decoder(_DECODING_SECONDS, MAX_PIXELS)

    def application(self) -> Starlette:
        """Returns the ASGI application."""
        return Starlette(
            middleware=[Middleware(Guard, host=self._options.host)],
            routes=[
                Route("/", self._help, methods=["GET"]),
                Route("/predict", self._predict, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._show_metrics, methods=["GET"]),
            ],
            exception_handlers={404: _misdirected, 405: _misdirected},
        )

    async def _predict(self, request: Request) -> Response:
        began = time.perf_counter()
        response = Response(status_code=500)  # As Starlette for any other exception.
        try:
            response = _Json(await self._answer(request))
        except HTTPException as error:
            response = _Json({"error": error.detail}, error.status_code, error.headers)
        except ClientDisconnect:  # Counted, although nobody receives the answer.
            response = Response(status_code=400)
        except asyncio.CancelledError:  # By uvicorn, which has waited long enough.
            response = _Json({"error": "The service ends."}, 503)
        finally:
            self._metrics.answers.labels(str(response.status_code)).inc()
            self._metrics.seconds.observe(time.perf_counter() - began)
        return response

    async def _answer(self, request: Request) -> dict[str, Any]:
        body = await self._receive(request)
        top_k = _requested_top_k(request)
        kind = request.headers.get("content-type", "")
        if self._waiting >= self._options.queue:
            message = f"{self._waiting} requests are waiting already; try again later."
            raise HTTPException(503, message, _RETRY)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, self._predict_images, body, kind, top_k
            )
        finally:
            self._waiting -= 1

    async def _receive(self, request: Request) -> bytes:
        """Returns the body of a request, within the limits."""
        size = int(request.headers.get("content-length", 0))
        # Closing a connection with unread data in it could destroy the answer before
        # the client reads it. So it stays open, or the rest is read and thrown away.
        closes = "close" in request.headers.get("connection", "").lower()
        closes |= request.scope["http_version"] == "1.0"
        body = bytearray()
        timeout = self._options.timeout_secs
        try:
            async with asyncio.timeout(timeout), self._receiving:
                if size <= self._max_bytes or closes:
                    async for chunk in request.stream():
                        size = max(size, len(body) + len(chunk))
                        if size <= self._max_bytes:
                            body += chunk
                        elif not closes:
                            break
        except TimeoutError as error:
            if size <= self._max_bytes:
                raise HTTPException(
                    408,
                    f"The request did not arrive within {timeout:g} seconds.",
                    {"Connection": "close"},
                ) from error
        if size > self._max_bytes:
            why = f"A request may have {self._max_bytes:,} bytes at most."
            raise HTTPException(413, why)
        return bytes(body)

    def _predict_images(
        self, body: bytes, kind: str, top_k: int | None
    ) -> dict[str, Any]:
        """Decodes and predicts an image, or those of a form; runs in a thread."""
        if self._model.weights_step is None:
            raise HTTPException(503, _NO_WEIGHTS, _RETRY)
        try:
            files = {"The request's body": body}
            if is_form := kind.lower().startswith("multipart/"):
                files = form.files(kind, body, MAX_IMAGES)
            images = self._decoder.decode(files, self._model.image_shape)
            step, logits, class_names = self._model.predict(images)
            count = ranking.checked(top_k, len(class_names))
        except TooCostlyError as error:
            raise HTTPException(422, str(error)) from error
        except UsageError as error:
            raise HTTPException(400, str(error)) from error
        try:
            ranked = ranking.top_k(logits, class_names, count)
        except UsageError as error:  # The model's fault, not the request's.
            raise HTTPException(500, str(error)) from error
        return {"step": step, "predictions": ranked if is_form else ranked[0]}

    async def _help(self, request: Request) -> Response:
        url, limits = str(request.base_url), (self._max_bytes, MAX_IMAGES, MAX_PIXELS)
        return PlainTextResponse(help_page.text(url, self._described(), *limits))

    async def _health(self, _request: Request) -> Response:
        health = self._described()
        return _Json(health, 503 if "error" in health else 200)

    async def _show_metrics(self, _request: Request) -> Response:
        text = generate_latest(self._metrics.registry)
        return Response(text, headers=_METRICS_TYPE)

    def _described(self) -> dict[str, Any]:
        """Returns the model and its state; an error if there are no weights."""
        if self._model.weights_step is None:
            return {"error": _NO_WEIGHTS}
        return {**self._model.names, **self._state()}

    def _state(self) -> dict[str, float | None]:
        return {
            "weights_step": self._model.weights_step,
            "age_seconds": self._model.age_seconds,
            "swap_seconds": self._model.swap_seconds,
            "swaps_total": self._model.swaps,
            "refused_total": self._model.refused,
            "waiting": self._waiting,
        }


async def _misdirected(request: Request, error: Exception) -> Response:
    what = f"There is no {request.method} {request.url.path}; GET / explains what is."
    return _Json({"error": what}, getattr(error, "status_code", 404))


class _Json(JSONResponse):
    """JSON that ends with its line, for terminals."""

    def render(self, content: Any) -> bytes:
        return super().render(content) + b"\n"


def _requested_top_k(request: Request) -> int | None:
    if (text := request.query_params.get("top_k")) is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise HTTPException(400, f"top_k {text[:20]}: it is a number of classes.")
    return int(text)
