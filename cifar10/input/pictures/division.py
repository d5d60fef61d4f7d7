"""Which pictures are to test on, where they come without a test part.

Each class is divided by itself: those of its pictures are tested on whose names have
the lowest hashes, below a limit. So the division is the same on every machine, and
pictures that are added move few others. A run keeps its limits in `config.json`, and by
them no picture that it was trained on is ever scored, whatever was added since.
"""

import hashlib
import math
import re
import unicodedata
from collections.abc import Sequence

_DIGITS = 16  # Of a limit, in hexadecimal.
# How a run of an older version was divided: by one limit for all classes.
BY_FRACTION = ""


def limits(
    classes: Sequence[Sequence[str]], fraction: float, division: str | None
) -> list[int]:
    """Returns for each class below which hash a picture is to test on.

    Args:
        classes: The names of each class's pictures.
        fraction: The share to test on. A class of two or more pictures has at least
            one of them in either part.
        division: As `written` by a run, or `BY_FRACTION`; None to divide anew, and so
            are other classes than those of the run.
    """
    if division == BY_FRACTION:
        return [math.ceil(fraction * 2**64)] * len(classes)
    if division and len(division) == _DIGITS * len(classes):
        return [int(limit, 16) for limit in re.findall("." * _DIGITS, division)]
    return [_limit(paths, fraction) for paths in classes]


def _limit(paths: Sequence[str], fraction: float) -> int:
    count = min(max(1, int(fraction * len(paths) + 0.5)), len(paths) - 1)
    if not fraction or count < 1:
        return 0
    return sorted(map(hash_of, paths))[count - 1] + 1


def written(limits: Sequence[int]) -> str:
    """Returns limits as a run keeps them."""
    most = 16**_DIGITS - 1
    return "".join(f"{min(limit, most):0{_DIGITS}x}" for limit in limits)


def hash_of(path: str) -> int:
    """Returns 64 bits that depend on a picture's name alone."""
    if path.isascii():
        content = path.encode()
    else:  # File systems write accents in two ways.
        path = unicodedata.normalize("NFC", path)
        content = path.encode(errors="surrogateescape")
    return int.from_bytes(hashlib.sha256(content).digest()[:8])
