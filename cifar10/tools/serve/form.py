"""The images of a form, as `curl -F image=@cat.png -F image=@dog.png` sends them."""

import re

from cifar10.errors import UsageError


def files(content_type: str, body: bytes, at_most: int) -> dict[str, bytes]:
    """Returns the contents of a form's parts by names for messages, in their order.

    The body is in memory and within the service's limits, so it is just split. General
    parsers copy its parts to the disk, or read them line by line.
    """
    # Not `email`, which fails at odd encodings; RFC 2046 allows a boundary none.
    named = re.search(r'[; ]boundary="?([^";]*)', content_type, re.IGNORECASE)
    boundary = (named[1] if named else "").rstrip().encode("ascii", "replace")
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary, at_most + 2)
    if len(parts) > at_most + 1:
        raise UsageError(
            f"The form has more than {at_most} images; send fewer at a time."
        )
    if not boundary or len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise UsageError("The form is damaged; send it as curl -F image=@cat.png does.")
    fields = [part.partition(b"\r\n\r\n") for part in parts[:-1]]
    contents = [content for head, _, content in fields if b"filename" in head]
    if not contents:
        raise UsageError(
            "The form has no file; send it as curl -F image=@cat.png does."
        )
    return {f"Image {n + 1} of {len(contents)}": c for n, c in enumerate(contents)}
