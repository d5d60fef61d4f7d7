"""The page that explains the service, readable with curl and in a browser."""

import textwrap
from typing import Any

from cifar10.input.pictures import decoding

_PAGE = """\
{state}

POST /predict: what is on images ({kinds}).
?top_k=5 names five classes.
  curl --data-binary @cat.png {url}predict
  curl -F image=@cat.png -F image=@dog.png {url}predict
A request may have {size:,} bytes and {images} images of {pixels:,} pixels each.

GET /health: the model, and the step and age of its weights.
  curl {url}health

GET /metrics: the same for Prometheus, and counts of the answers.
  curl {url}metrics
"""


def text(url: str, health: dict[str, Any], size: int, images: int, pixels: int) -> str:
    """Returns the page; the service has an address, a health, and limits."""
    state = f"No image can be classified yet. {health.get('error')}"
    if "error" not in health:
        classes = ", ".join(health["class_names"])
        state = f"Model {health['model']}, step {health['weights_step']}: {classes}."
    state = textwrap.fill(state, 80)
    kinds = ", ".join(decoding.KINDS)
    return _PAGE.format(
        state=state, kinds=kinds, url=url, size=size, images=images, pixels=pixels
    )
