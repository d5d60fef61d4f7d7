"""Serves an exported model over HTTP, without TensorFlow and without this package.

    python -m cifar10 export --with_preprocessing --output model.onnx
    pip install onnxruntime pillow starlette uvicorn
    python deploy/onnx_server.py model.onnx --port 8000

    curl --data-binary @cat.png http://127.0.0.1:8000/predict

The body is the file itself, not a form. Answers are those of `python -m cifar10
serve`, within its limits; but some pictures with damaged metadata are refused.
GET /health names the model; GET /metrics counts, in Prometheus's text format, requests
to /predict by status, and sums up the seconds until their answers. The service has no
passwords and no limits on connections: publish it to strangers through a proxy.
"""

import argparse
import asyncio
import collections
import io
import json
import re
import socket
import time

import numpy as np
import onnxruntime
import uvicorn
from PIL import ExifTags, Image, ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

# In bytes and pixels: a photograph by a phone.
_MOST_BYTES, _MOST_PIXELS = 10_000_000, 50_000_000
# The first bytes of the files that training reads, and the class that reads each.
_KINDS: dict[bytes, type[ImageFile]] = {
    rb"\x89PNG\r\n\x1a\n": PngImageFile,
    rb"\xff\xd8\xff": JpegImageFile,
    rb"RIFF(?s:....)WEBP": WebPImageFile,
    rb"BM": BmpImageFile,
    rb"GIF8[79]a": GifImageFile,
}
_START = re.compile(b"|".join(_KINDS))
# JPEG and GIF files may hold previews behind their ends, but not behind an &.
_JOINED = re.compile(rb"(?:IEND\xaeB`\x82|\xff\xd9&|\0;&)&?(?:%s)" % _START.pattern)


class UnusableError(Exception):
    """A file holds no model that this server can use."""


class PictureError(ValueError):
    """A body is no picture that training reads; the message says why."""


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
            PictureError: The content is no picture that training reads.
        """
        height, width, channels = self._shape
        colours = decode(content, height, width)
        if channels == 1:
            colours = colours.convert("L")
        pixels = np.asarray(colours).reshape(1, height, width, channels)
        (probabilities,) = self._session.run(None, {"images": pixels})[0]
        names = self.description["class_names"]
        ranked = np.argsort(-probabilities, kind="stable")[:top_k]
        return [
            {"class": names[index], "probability": float(probabilities[index])}
            for index in ranked
        ]


def decode(content: bytes, height: int, width: int) -> Image.Image:
    """Decodes a picture file as training does: upright, RGB, of the given size.

    Raises:
        PictureError: The content is no picture that training reads.
    """
    kinds = (kind for start, kind in _KINDS.items() if re.match(start, content))
    if (kind := next(kinds, None)) is None:
        what = "neither a PNG nor a JPEG, WebP, BMP or GIF image"
        raise PictureError(f"The body is {what}.")
    if _is_joined(content):
        raise PictureError("The body holds several pictures.")
    try:
        return _fitted(kind(io.BytesIO(content)), content, height, width)
    except PictureError:
        raise
    except Exception as error:  # Pillow raises anything for a damaged file.
        raise PictureError(f"The body is not a readable picture: {error}.") from error


def _is_joined(content: bytes) -> bool:
    """Returns whether another picture follows, as `curl` joins several files by &."""
    end = len(content)
    if content.startswith(b"BM"):  # These formats begin with their length.
        end = int.from_bytes(content[2:6], "little") or end
    elif content.startswith(b"RIFF"):
        end = 8 + int.from_bytes(content[4:8], "little")
    follows = _START.match(content[end:].lstrip(b"&"))
    return bool(follows or _JOINED.search(content))


def _fitted(image: ImageFile, content: bytes, height: int, width: int) -> Image.Image:
    """Crops and resizes a picture, on white if it is transparent."""
    if image.width * image.height > _MOST_PIXELS:
        raise PictureError(f"The picture has over {_MOST_PIXELS:,} pixels.")
    if isinstance(image, JpegImageFile):  # Decodes less of a large picture.
        side = int(1.25 * max(height, width))
        image.draft(None, (side, side))
    image.load()
    orientation = _orientation(image)
    upright = image if _depth(image, content) < 16 else _in_8_bits(image)
    if (transparent := _transparent(image, content)) is not None:
        upright = upright.convert("RGB")
        upright.putalpha(Image.fromarray(np.where(transparent, 0, 255).astype("uint8")))
    upright = upright.convert("RGBA" if upright.has_transparency_data else "RGB")
    # Orientations from 5 to 8 exchange width and height.
    size = (height, width) if orientation >= 5 else (width, height)
    upright = ImageOps.fit(upright, size, Image.Resampling.BICUBIC)
    if orientation != 1:
        # A copy without other EXIF data, which raise errors if they are malformed.
        upright = Image.fromarray(np.asarray(upright))
        upright.getexif()[ExifTags.Base.Orientation] = orientation
        ImageOps.exif_transpose(upright, in_place=True)
    if upright.mode == "RGB":
        return upright
    white = Image.new("RGBA", upright.size, "white")
    return Image.alpha_composite(white, upright).convert("RGB")


def _depth(image: ImageFile, content: bytes) -> int:
    """Returns the bits of a value in a picture's file."""
    return content[24] if isinstance(image, PngImageFile) else 8


def _orientation(image: Image.Image) -> int:
    """Returns an image's EXIF orientation; 1 if it cannot be read."""
    try:
        found = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 - Pillow raises anything for damaged metadata.
        return 1
    return int(found) if found in range(1, 9) else 1


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Returns a picture of 16 bits in 8; refuses 12, which would be almost black."""
    pixels, highest = np.asarray(image), 0
    if pixels.ndim == 2:  # Grey, which `convert` would clip.
        highest = int(pixels.max())
        image = Image.fromarray((pixels >> 8).astype(np.uint8))
    elif pixels[..., 3:].min(initial=255) == 255:  # Not shapes that will be on white.
        upper = int(pixels[..., :3].max())  # Pillow reads the upper bytes.
        highest = upper and 255 + 256 * upper
    if 0 < highest < 2**12:
        why = f"The picture's 16-bit values are at most {highest}, and would be black"
        raise PictureError(f"{why} in 8 bits: scale them to 65535.")
    return image


def _transparent(image: ImageFile, content: bytes) -> np.ndarray | None:
    """Returns where a PNG file's one transparent colour is, if Pillow errs there."""
    colour, depth = image.info.get("transparency"), _depth(image, content)
    if colour is None or image.mode == "P" or depth in (1, 8):
        return None
    pixels = np.asarray(image)
    if image.mode != "RGB":
        return pixels == colour * {2: 85, 4: 17, 16: 1}[depth]
    # Pillow reads the upper byte of each value, or the lower as if it were the upper.
    lower = PngImageFile(io.BytesIO(content))
    lower.tile = [tile._replace(args="RGB;16L") for tile in lower.tile]
    whole = pixels * np.uint16(256) + np.asarray(lower)
    return (whole == np.array(colour, np.uint16)).all(axis=2)


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
        except PictureError as error:
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
