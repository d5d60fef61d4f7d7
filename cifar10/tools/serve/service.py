"""A small HTTP service over a copy of a model: predict, health, metrics.

It defends itself against what a client may do: a body that is too large is not read,
one that comes too slowly is given up, and when too many wait the next is sent away at
once. Images are decoded and predicted in threads, so no request holds up the others.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cifar10.errors import UsageError
from cifar10.follower.live_copy import Prediction
from cifar10.input import records
from cifar10.tools.predict import pictures, top_k as likeliest
from cifar10.tools.serve.service_metrics import ServiceMetrics

# What a telephone's camera makes; each thread may decode as many, at 12 bytes each.
MAX_PIXELS = 12_500_000
_BODY = "The request's body"
_TOP_K = 3
# The threads only share the processor's cores; TensorFlow divides the work itself.
_MOST_THREADS = 4
_RETRY_SECONDS = "1"


class Copy(Protocol):
    """What is asked: a follower, or an exported model."""

    swaps: int
    swap_seconds: float | None

    @property
    def refused(self) -> int: ...  # noqa: D102 - see `Follower`.

    @property
    def weights_step(self) -> int | None: ...  # noqa: D102

    @property
    def age_seconds(self) -> float | None: ...  # noqa: D102

    def predict(self, images: np.ndarray) -> Prediction: ...  # noqa: D102

    def why_no_weights(self) -> str: ...  # noqa: D102


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a client may ask for.

    Attributes:
        bytes: The largest body of a request.
        seconds: How long a client may take to send it.
        waiting: How many requests may be at work or wait for it.
    """

    bytes: int = 10_000_000
    seconds: float = 10.0
    waiting: int = 64


class _RefusedError(Exception):
    """A request is not answered; the message says why."""

    def __init__(self, status: int, why: str, **headers: str) -> None:
        super().__init__(why)
        self.status = status
        self.headers = headers


class Service:
    """Answers requests from a copy of a model.

    Args:
        copy: The copy.
        limits: What a client may ask for.
    """

    def __init__(self, copy: Copy, limits: Limits) -> None:
        self._copy = copy
        self._limits = limits
        self._waiting = 0
        self._metrics = ServiceMetrics(self._now)
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="predict")

    def application(self) -> Starlette:
        """Returns what an ASGI server runs."""
        return Starlette(
            routes=[
                Route("/predict", self._predict, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._tell_metrics, methods=["GET"]),
            ]
        )

    async def _predict(self, request: Request) -> Response:
        began = time.perf_counter()
        status = 500  # What the server answers where this fails.
        try:
            response = await self._answer_or_refuse(request)
            status = response.status_code
        finally:
            self._metrics.count(status, time.perf_counter() - began)
        return response

    async def _answer_or_refuse(self, request: Request) -> Response:
        try:
            return JSONResponse(await self._answer(request))
        except _RefusedError as refused:
            return JSONResponse(
                {"error": str(refused)}, refused.status, refused.headers
            )
        except ClientDisconnect:  # Nobody reads this, but it is counted.
            return Response(status_code=400)

    async def _answer(self, request: Request) -> dict[str, Any]:
        top_k = _top_k(request)
        body = await self._body(request)
        if self._waiting >= self._limits.waiting:
            raise _RefusedError(
                503,
                f"{self._waiting} requests are waiting already; try again later.",
                **{"Retry-After": _RETRY_SECONDS},
            )
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, self._look_at, body, top_k
            )
        finally:
            self._waiting -= 1

    async def _body(self, request: Request) -> bytes:
        """Reads a request's body, as far as the limits allow."""
        if request.headers.get("content-type", "").startswith("multipart/"):
            raise _RefusedError(
                415,
                "Send the image's bytes as the body, not a form: "
                "curl --data-binary @cat.png",
            )
        most = self._limits.bytes
        # The connection stays: closed with the rest of the body unread, it would often
        # take the answer with it. `ImpatientProtocol` ends it if the rest takes long.
        too_large = _RefusedError(413, f"An image may have {most:,} bytes at most.")
        if int(request.headers.get("content-length", 0)) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise too_large
        except TimeoutError as error:
            raise _RefusedError(
                408,
                f"The image did not come within {self._limits.seconds:g} seconds.",
                Connection="close",
            ) from error
        return bytes(body)

    def _look_at(self, body: bytes, top_k: int) -> dict[str, Any]:
        """Decodes an image and predicts what it shows; runs in a thread."""
        if self._copy.weights_step is None:
            raise _RefusedError(
                503, self._copy.why_no_weights(), **{"Retry-After": _RETRY_SECONDS}
            )
        try:
            image = pictures.decode(
                body, _BODY, records.HEIGHT, records.WIDTH, MAX_PIXELS
            )
            step, logits, class_names = self._copy.predict(image[np.newaxis])
            likeliest.check(top_k, len(class_names))
        except UsageError as error:
            raise _RefusedError(400, str(error)) from error
        try:
            (classes,) = likeliest.of(logits, class_names, top_k)
        except UsageError as error:  # It is the model's fault, not the request's.
            raise _RefusedError(500, str(error)) from error
        return {"step": step, **likeliest.as_json(classes)}

    async def _health(self, request: Request) -> Response:
        del request
        if self._copy.weights_step is None:
            return JSONResponse({"error": self._copy.why_no_weights()}, 503)
        return JSONResponse(self._now())

    async def _tell_metrics(self, request: Request) -> Response:
        del request
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._metrics.text(), headers={"content-type": kind})

    def _now(self) -> dict[str, float | None]:
        return {
            "weights_step": self._copy.weights_step,
            "age_seconds": self._copy.age_seconds,
            "swap_seconds": self._copy.swap_seconds,
            "swaps_total": self._copy.swaps,
            "refused_total": self._copy.refused,
            "waiting": self._waiting,
        }


def _top_k(request: Request) -> int:
    given = request.query_params.get("top_k", str(_TOP_K))
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise _RefusedError(400, f"top_k {given[:20]}: it is a number of classes.")
    return int(given)
