"""What fails in a user's code, as a sentence and the lines that led there."""

import contextlib
import os
import re
import traceback
from collections.abc import Iterator

import keras
import tensorflow as tf

from cifar10 import errors

# Whoever wrote a model looks for the mistake in its lines, not in those of libraries.
_LIBRARIES = tuple(
    os.path.join(os.path.dirname(str(module.__file__)), "")  # noqa: PTH118, PTH120
    for module in (errors, keras, os, tf)
)
# What helps, by what is found in a traceback.
_HINTS = {
    r"size must be at least|size would be|[Nn]egative dimension|pooling .*primitive": (
        "With --distortions flip_translate images are whole, not cropped; a\n"
        "keras.layers.Resizing at the beginning of the model makes them larger."
    ),
    r"(?s)models/sequential\.py.*(expected axis|merge layer)": (
        "A network with branches is no chain of its layers, as keras.Sequential is.\n"
        "Use keras.Model(base.input, layers.Dense(classes)(base.layers[-2].output))."
    ),
    r"using weights=.imagenet": ("Give weights=None, to train from initial values."),
    r"URL fetch failure": (
        "Without a network, train from initial values with weights=None, or put the\n"
        "file into ~/.keras/models beforehand."
    ),
}


@contextlib.contextmanager
def explained(name: str, problem: str) -> Iterator[None]:
    """Turns what the code of `--model name` raises into a `UsageError`."""
    try:
        yield
    except (errors.UsageError, errors.StoppedError, BrokenPipeError):
        raise
    except Exception as error:
        frames = [
            tuple(frame)  # Without the columns, which would be a line of their own.
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith(("<", *_LIBRARIES))
        ]
        lines = f"{type(error).__name__}: {errors.reason(error)}\n"
        lines += "".join(traceback.format_list(frames))
        whole = "".join(traceback.format_exception(error))
        lines += "\n".join(
            hint for said, hint in _HINTS.items() if re.search(said, whole)
        )
        message = f"--model {name}: {problem}.\n{lines}".rstrip("\n")
        raise errors.UsageError(message) from error
