"""What fails in a user's code, as a sentence and the lines that led there."""

from __future__ import annotations

import contextlib
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import keras
import tensorflow as tf

from cifar10.errors import StoppedError, UsageError, reason

# Whoever wrote a model looks for the mistake in her own lines, not in these.
_LIBRARIES = (
    Path(__file__).parents[1],
    Path(keras.__file__).parent,
    Path(tf.__file__).parent,
    Path(sysconfig.get_path("stdlib")),
)

# What helps, by what Keras and TensorFlow say.
_HINTS = {
    r"size must be at least|size would be|[Nn]egative dimension|pooling .*primitive": (
        "With --distortions flip_translate images are whole, 32 x 32; a\n"
        "keras.layers.Resizing at the beginning of the model makes them larger."
    ),
    r"(?s)models/sequential\.py.*(expected axis|merge layer)": (
        "A network with branches is no chain of its layers, as keras.Sequential is.\n"
        "Use keras.Model(base.input, layers.Dense(classes)(base.layers[-2].output))."
    ),
    r"URL fetch failure": (
        "Without a network, train from initial values with weights=None, or put the\n"
        "file into ~/.keras/models beforehand."
    ),
}


@contextlib.contextmanager
def explained(name: str, problem: str) -> Iterator[None]:
    """Turns what the code of `--model name` raises into a `UsageError`.

    Args:
        name: The value of `--model`.
        problem: What it means that the code raises something.
    """
    try:
        yield
    except (UsageError, StoppedError, BrokenPipeError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {reason(error)}"
        lines = [f"--model {name}: {problem}.", what, *_users_lines(error)]
        whole = "".join(traceback.format_exception(error))
        lines += [hint for said, hint in _HINTS.items() if re.search(said, whole)]
        raise UsageError("\n".join(lines)) from error


def _users_lines(error: Exception) -> list[str]:
    """Returns the part of a traceback that lies in the user's own files."""
    frames = [
        tuple(frame)  # Without the columns, which would be a line of their own.
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(path) for path in _LIBRARIES)
        and not frame.filename.startswith("<")
    ]
    return [line.rstrip("\n") for line in traceback.format_list(frames)]
