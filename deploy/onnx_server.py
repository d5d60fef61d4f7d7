"""Serves an exported model over HTTP, without TensorFlow and without this package.

    python -m cifar10 export --with_preprocessing --output model.onnx
    pip install onnxruntime pillow starlette uvicorn
    python deploy/onnx_server.py model.onnx --port 8000

    curl --data-binary @cat.png http://127.0.0.1:8000/predict

The body is the file itself, not a form. Answers are those of `python -m cifar10
serve`. GET /health names the model; GET /metrics counts, in Prometheus's text format,
requests to /predict by status, and sums up the seconds until their answers. The
service has no passwords and no limits on connections: publish it to strangers through
a proxy.
"""

import argparse
import asyncio
import collections
import io
import json
import socket
import time

import numpy as np
import onnxruntime
import uvicorn
from PIL import Image, ImageOps, UnidentifiedImageError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

_NO_PICTURE = (
    *(OSError, SyntaxError, UnidentifiedImageError),
    Image.DecompressionBombError,
)
# In bytes and pixels: a photograph by a phone.
_MOST_BYTES, _MOST_PIXELS = 10_000_000, 50_000_000


class UnusableError(Exception):
    """A file holds no model that this server can use."""


class Classifier:
    """An exported model, from `export --with_preprocessing`.

    Attributes:
        description: What the export says of itself: classes, step, shapes.
    """

    def __init__(self, path: str) -> None:
        try:
            self._session = onnxruntime.InferenceSession(path)
        except Exception as error:  # onnxruntime's errors have no common class.
            raise UnusableError(
                f"{path} cannot be read as an ONNX model: {error}"
            ) from error
        found = self._session.get_modelmeta().custom_metadata_map
        try:
            self.description = json.loads(found.get("cifar10.json", "{}"))
            if not self.description.get("with_preprocessing"):
                raise UnusableError(f"{path}: export it with --with_preprocessing.")
            self._shape = self.description["picture_shape"]
        except (ValueError, AttributeError, KeyError) as error:
            raise UnusableError(
                f"{path}: its cifar10.json is damaged: {error!r}"
            ) from error

    def classify(self, content: bytes, top_k: int) -> list[dict[str, object]]:
        """Returns the likeliest classes of the picture in a file's content.

        Raises:
            ValueError: The content is no picture that Pillow reads.
        """
        height, width, channels = self._shape
        try:
            with Image.open(io.BytesIO(content)) as image:
                if image.width * image.height > _MOST_PIXELS:
                    raise ValueError(f"The picture has over {_MOST_PIXELS:,} pixels.")
                upright = ImageOps.exif_transpose(image)
                fitted = _fitted(upright, (width, height))
        except _NO_PICTURE as error:
            raise ValueError(f"The body is not a readable picture: {error}.") from error
        colours = fitted.convert("RGB" if channels == 3 else "L")
        pixels = np.asarray(colours).reshape(1, height, width, channels)
        (probabilities,) = self._session.run(None, {"images": pixels})[0]
        names = self.description["class_names"]
        ranked = np.argsort(-probabilities, kind="stable")[:top_k]
        return [
            {"class": names[index], "probability": float(probabilities[index])}
            for index in ranked
        ]


def _fitted(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Crops and resizes a picture as in training, on white if it is transparent."""
    if picture.mode.startswith("I"):  # 16-bit grey, which `convert` would clip.
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    picture = picture.convert("RGBA" if picture.has_transparency_data else "RGB")
    picture = ImageOps.fit(picture, size, Image.Resampling.BICUBIC)
    if picture.mode == "RGB":
        return picture
    return Image.alpha_composite(Image.new("RGBA", size, "white"), picture)


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return JSONResponse({"error": getattr(error, "detail", "")}, status)


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MOST_BYTES:
                raise HTTPException(413, f"Send at most {_MOST_BYTES:,} bytes.")
    except ClientDisconnect as error:  # Nobody reads the answer.
        raise HTTPException(400, "The body is incomplete.") from error
    return bytes(body)


def application(classifier: Classifier) -> Starlette:
    """Returns the service of a model."""
    counts: collections.Counter[str] = collections.Counter()
    seconds = 0.0
    step = classifier.description["step"]

    async def predict(request: Request) -> JSONResponse:
        nonlocal seconds
        began, status = time.monotonic(), 500
        try:
            answer = JSONResponse({"step": step, "predictions": await found(request)})
            status = 200
        except HTTPException as error:
            status = error.status_code
            raise
        finally:
            counts[f"{status // 100}xx"] += 1
            seconds += time.monotonic() - began
        return answer

    async def found(request: Request) -> list[dict[str, object]]:
        body = await _body(request)
        top_k = request.query_params.get("top_k", "3")
        if not (top_k.isascii() and top_k.isdigit() and int(top_k[:9]) > 0):
            raise HTTPException(400, f"top_k {top_k[:20]}: give a number of classes.")
        try:
            # In a thread, so that no request blocks another.
            how = classifier.classify, body, int(top_k[:9])
            return await asyncio.to_thread(*how)
        except ValueError as error:
            fix = "Send a file itself: curl --data-binary @FILE."
            raise HTTPException(400, f"{error} {fix}") from error

    async def health(_: Request) -> JSONResponse:
        names = {key: classifier.description[key] for key in ("model", "class_names")}
        return JSONResponse({**names, "weights_step": step})

    async def metrics(_: Request) -> PlainTextResponse:
        lines = [
            f'cifar10_requests_total{{status="{status}"}} {counts[status]}'
            for status in ("2xx", "4xx", "5xx")
        ]
        lines += [
            f"cifar10_answer_seconds_sum {seconds:.6f}",
            f"cifar10_answer_seconds_count {counts.total()}",
            f"cifar10_weights_step {step}",
        ]
        return PlainTextResponse("\n".join([*lines, ""]))

    routes = [
        Route("/predict", predict, methods=["POST"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _refuse})


def main() -> None:
    """Runs the server until SIGTERM or Ctrl-C."""
    what = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("model", help="an .onnx file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    try:
        app = application(Classifier(given.model))
        listener = socket.create_server((given.host, given.port))
    except (UnusableError, OSError, OverflowError) as error:
        parser.error(str(error))
    uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=7)).run([listener])


if __name__ == "__main__":
    main()
