"""Functions that are traced once in a training, of which a process may run many."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def traced(
    function: Callable[..., Any], *, jit_compile: bool | None = None
) -> tf.types.experimental.PolymorphicFunction:
    """Returns a function as a graph, like `tf.function`, but with warnings of its own.

    TensorFlow counts tracings by the code of a function. So it would warn at the fifth
    training of a process, which traces the same code for the fifth model. It counts a
    `partial` by itself: only what one training traces again and again is warned of.
    """
    own = functools.partial(function)
    return tf.function(own, autograph=False, jit_compile=jit_compile)
