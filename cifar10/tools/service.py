"""The HTTP service of a model: predictions and health.

The service withstands misbehaving clients. It limits the size of a request, the time to
send one, and the number of connections. Pages of other web sites cannot read answers.
Images are decoded and classified in threads, so no request blocks another.
"""

import asyncio
import base64
import collections
import json
import math
import multiprocessing
import re
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote_to_bytes

import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cifar10.follower import Follower
from cifar10.input.pictures.decoding import START, PictureError, is_picture
from cifar10.tools.classification import Decoder, likeliest_classes

# A phone camera's resolution. A thread needs 12 bytes per pixel to decode an image.
_MAX_PIXELS = 12_500_000
# With four threads, a picture seldom waits for slow ones. Each thread has a process for
# decoding. TensorFlow divides the work of predictions itself.
_THREADS = 4
# The largest images take a third of this time; see `Decoder`.
_DECODING_SECONDS = 1.0
_MAX_CONNECTIONS = 256  # Each may hold a whole request in memory.
# Open files of TensorFlow, the run and the decoding processes: about 50 are in use.
_OTHER_FILES = 128
# Seconds after SIGTERM to finish answers; containers are killed after 10.
_SHUTDOWN_SECONDS = 7
_SHORT, _MOST_PARTS = 32, 100  # Words that are no picture; parts or words decoded.
# Base64 in text, where some write - for + and _ for /; others become spaces.
_BASE64 = re.sub(rb"[^\w+/]", b" ", bytes.maketrans(b"-_", b"+/"))
_LONGEST_LINE = 998  # Of mail (RFC 5322), so of a picture in several lines.
# JPEG and GIF files may hold previews behind their ends, but not behind an &.
_JOINED = re.compile(rb"(?:IEND\xaeB`\x82|\xff\xd9&|\0;&)&?(?:%s)" % START.pattern)
_FIX = (
    " Send the file itself (curl --data-binary @FILE), a form with one file (curl -F "
    'image=@FILE), or JSON with base64: {"instances": [{"b64": "..."}]}.'
)
_SEVERAL = "The request holds several pictures, or base64 with spaces in it."


class Service:
    """Answers HTTP requests with a model, whose weights may change at any time.

    After connecting, and after each answer, a client has `timeout` seconds to send a
    request's headers, and then as long again to send the body of at most `max_bytes`.
    """

    def __init__(
        self, model: Follower, host: str, max_bytes: int, timeout: float
    ) -> None:
        self._model = model
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="predict")
        self._decoder = Decoder(_DECODING_SECONDS, _MAX_PIXELS)
        self._own_host = _own_host(host)
        self._counts = collections.Counter[int]()  # By the first digit of a status.
        self._seconds = 0.0

    def create_server(self) -> uvicorn.Server:
        """Returns the HTTP server, ready to run on a listening socket."""
        config = uvicorn.Config(
            self,
            loop="asyncio",  # uvloop accepts any number of connections at a time.
            http=_Connection,
            # asyncio accepts this many connections at a time, and up to four times as
            # many before `connection_made` of the first one can close some.
            backlog=connection_limit() // 4,
            timeout_keep_alive=math.ceil(self._timeout),
            ws="none",
            lifespan="off",
            # Logging is set up already; uvicorn's set-up would close absl's stream.
            log_config=None,
            log_level="warning",
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        return uvicorn.Server(config)

    def close(self) -> None:
        """Ends the threads and their decoders, whatever they are doing."""
        for decoder in multiprocessing.active_children():
            decoder.kill()  # Nobody waits for what it decodes.
        self._threads.shutdown(cancel_futures=True)
        # Python itself may write to the pipe of a pool that has just closed it.
        self._decoder.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, as ASGI defines."""
        began, answer = time.monotonic(), Response(status_code=500)
        try:
            found = await self._answer(Request(scope, receive))
            kind = PlainTextResponse if isinstance(found, str) else JSONResponse
            answer = kind(found)
        except HTTPException as error:
            found = {"error": error.detail}
            answer = JSONResponse(found, error.status_code, error.headers)
        except ClientDisconnect:
            answer = Response(status_code=400)  # Nobody reads it.
        except asyncio.CancelledError:  # uvicorn does this after `_SHUTDOWN_SECONDS`.
            answer = JSONResponse({"error": "The service is shutting down."}, 503)
        finally:
            if scope["path"] == "/predict":
                self._counts[answer.status_code // 100] += 1
                self._seconds += time.monotonic() - began
        await answer(scope, receive, send)

    def _metrics(self) -> str:
        """Returns counters of /predict in Prometheus's text format."""
        counts, step = self._counts, self._model.weights_step
        by_status = 'cifar10_requests_total{{status="{}xx"}}'.format
        values = {by_status(digit): counts[digit] for digit in (2, 4, 5)} | {
            "cifar10_images_total": counts[2],  # A success is the answer to a picture.
            "cifar10_answer_seconds_sum": self._seconds,
            "cifar10_answer_seconds_count": counts.total(),
            "cifar10_weights_step": "NaN" if step is None else step,
        }
        return "".join(f"{name} {value}\n" for name, value in values.items())

    async def _answer(self, request: Request) -> dict[str, Any] | str:
        if why := self._refusal(request.headers):
            raise HTTPException(400, why, {"Connection": "close"})
        if (asked := f"{request.method} {request.scope['path']}") == "GET /metrics":
            return self._metrics()
        if asked not in ("POST /predict", "GET /health", "HEAD /health"):
            raise HTTPException(404, "Not Found: use POST /predict or GET /health.")
        body = await self._receive(request)
        if self._model.weights_step is None:
            # The full reason names paths of this machine.
            why = "No checkpoint can be used yet. The service's console says why."
            raise HTTPException(503, why)
        if request.method != "POST":
            return {
                **self._model.names,
                "weights_step": self._model.weights_step,
                "age_seconds": self._model.age_seconds,
            }
        top_k = request.query_params.get("top_k", "3")
        if not re.fullmatch("[1-9][0-9]{0,8}", top_k):
            raise HTTPException(400, f"top_k {top_k[:20]}: give a number of classes.")
        kind = request.headers.get("content-type", "")
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._classify, body, kind, int(top_k)
        )

    def _refusal(self, headers: Headers) -> str | None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may use the other header, and see two requests in one.
            return "Content-Length and Transfer-Encoding cannot be combined."
        # The domain of another site may point at this machine's address. Its pages can
        # then read the answers, but their requests name the domain as the host.
        if not self._own_host.fullmatch(headers.get("host", "localhost")):
            return "The service has another name. Use its machine's IP address."
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return "Pages of other web sites may not use the service."
        return None

    async def _receive(self, request: Request) -> bytes:
        """Returns a request's body, within the limits on time and size."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout):
                # A body that is too large is read to its end: to close a connection
                # with unread data could destroy the answer before the client reads it.
                async for chunk in request.stream():
                    if len(body) <= self._max_bytes:
                        body += chunk
        except TimeoutError as error:
            why = f"The request did not arrive within {self._timeout:g} seconds."
            raise HTTPException(408, why, {"Connection": "close"}) from error
        if len(body) > self._max_bytes:
            why = f"A request may have at most {self._max_bytes:,} bytes."
            raise HTTPException(413, why)
        return bytes(body)

    def _classify(self, body: bytes, kind: str, top_k: int) -> dict[str, Any]:
        """Decodes and classifies an image; runs in a thread."""
        shape, content = self._model.image_shape, _picture_in(body, kind)
        try:
            image = self._decoder.decode(content, "The request's body", shape)
        except PictureError as error:
            # `curl -d` leaves out these characters.
            is_whole = is_picture(content) and re.search(rb"[\r\n\0]", content)
            raise HTTPException(400, f"{error}{'' if is_whole else _FIX}") from error
        step, logits, class_names = self._model.predict(image[None])
        (ranked,) = likeliest_classes(logits, class_names, top_k)
        return {"step": step, "predictions": ranked}


def _picture_in(body: bytes, kind: str) -> bytes:
    """Returns the one picture in a form, in JSON or in other text, or else the body.

    `kind` is the body's Content-Type. In text a picture is in base64, as TensorFlow
    Serving's clients and data URLs have it. Several pictures, usable or not, are
    refused: an answer for one of them would seem to be for all.
    """
    found: list[bytes] = []
    if is_picture(body):
        found = [body]
    elif boundary := re.search(r'(?i)multipart/.*boundary="?([^";,]+)', kind):
        parts = body.split(b"\r\n--" + boundary[1].encode(), _MOST_PARTS)
        if not 1 < len(parts) <= _MOST_PARTS:
            why = f"The form lacks its boundary, or has over {_MOST_PARTS} parts."
            raise HTTPException(400, why + _FIX)
        for head, _, content in (part.partition(b"\r\n\r\n") for part in parts):
            # A form's empty field for a file has an empty name.
            if is_picture(content) or re.search(rb'filename\*?="?[^"\s]', head):
                found.append(content)
    elif body.lstrip(b"\xef\xbb\xbf \r\n\t").startswith((b"{", b"[", b'"')):
        found = _in_json(body)
    elif body.isascii():
        found = _decoded(unquote_to_bytes(body))
    found = found or [body]
    if len(found) > 1 or _is_joined(found[0]):
        raise HTTPException(400, _SEVERAL + _FIX)
    return found[0]


def _is_joined(content: bytes) -> bool:
    """Returns whether another picture follows, as `curl` joins several files by &."""
    end = len(content)
    if content.startswith(b"BM"):  # These formats begin with their length.
        end = int.from_bytes(content[2:6], "little") or end
    elif content.startswith(b"RIFF"):
        end = 8 + int.from_bytes(content[4:8], "little")
    return is_picture(content[end:].lstrip(b"&")) or _JOINED.search(content) is not None


def _in_json(body: bytes) -> list[bytes]:
    """Returns decoded texts: of "b64", and any others that are pictures."""
    try:  # Objects become tuples of pairs, which keep a key that occurs twice.
        values = [("", json.loads(body, strict=False, object_pairs_hook=tuple), 1)]
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"The JSON is damaged: {error}.{_FIX}") from error
    found: list[bytes] = []
    while values:
        key, value, times = values.pop()
        if isinstance(value, tuple):
            values += [(name, inner, times) for name, inner in value]
        elif isinstance(value, list):
            # Twice beside other items, which may be pictures that cannot be used.
            times = 2 if len(value) > 1 else times
            values += [(key, inner, times) for inner in value]
        elif isinstance(value, str):
            some = _decoded(text := value.encode("ascii", "replace"))
            if key == "b64" or any(map(is_picture, some)):
                found += (some or [text]) * times
    return found


def _decoded(text: bytes) -> list[bytes]:
    """Decodes the long base64 words in a text of one or more lines."""
    is_wrapped = all(len(line) <= _LONGEST_LINE for line in text.splitlines())
    # Not by regular expressions, which would take seconds for hostile text.
    words = text.translate(_BASE64, b"\r\n\t" if is_wrapped else b"").split()
    coded = [word for word in words if len(word) > _SHORT][:_MOST_PARTS]
    # A last character alone is not base64, for which Python raises an error.
    return [
        base64.b64decode(word[: len(word) - (len(word) % 4 == 1)] + b"==")
        for word in coded
    ]


def _own_host(host: str) -> re.Pattern[str]:
    """Returns the pattern of Host headers that name this machine."""
    names = ("localhost", host, socket.gethostname(), socket.getfqdn(host))
    own = "|".join(map(re.escape, names))
    # All IP addresses are accepted: nobody can redirect an address, and a container
    # does not know its own. Starlette's TrustedHostMiddleware takes only names.
    addresses = r"[0-9.]+|\[[0-9a-f:.]+\]"
    return re.compile(rf"({own}|{addresses})(:[0-9]+)?", re.IGNORECASE | re.ASCII)


def connection_limit() -> int:
    """Returns how many connections may be open: half of the limit on open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, min(_MAX_CONNECTIONS, (files - _OTHER_FILES) // 2))


class _Connection(H11Protocol):
    """A connection with a deadline for the headers of each request.

    uvicorn's own deadline ends with the first byte of a request.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """If too many connections are open, closes the one that has waited longest.

        Only connections without a request are closed, and this one last. So the probe
        of a health check is answered, even beside many clients that send nothing.
        """
        super().connection_made(transport)  # type: ignore[arg-type]
        self._await_request()
        connections: set[Any] = self.connections
        others = [one for one in connections if not one.transport.is_closing()]
        if len(others) > connection_limit():
            waiting = (one for one in others if one.cycle is one.answered)
            min(waiting, key=lambda one: one.since).transport.abort()

    def on_response_complete(self) -> None:
        """Sets the deadline of the next request's headers."""
        self._await_request()
        super().on_response_complete()

    def _await_request(self) -> None:
        # uvicorn makes another object for the next request.
        self.answered = answered = self.cycle
        self.since = self.loop.time()

        def end() -> None:
            if self.cycle is answered:
                self.transport.abort()

        self.loop.call_later(self.timeout_keep_alive, end)
