"""Turns TensorFlow's errors in a step into advice for the user."""

import contextlib
import re
from collections.abc import Callable, Iterator

import tensorflow as tf

from cifar10.errors import UsageError

# These occur in TensorFlow's error if XLA cannot compile a step; the last one if cuDNN
# has no convolution that XLA can use.
_OF_XLA = "tf2xla|libdevice|could not find any supported configs"


@contextlib.contextmanager
def explaining_failures(
    batch_size: int, how_to_resume: Callable[[], str]
) -> Iterator[None]:
    """Raises a `UsageError` if memory runs out or XLA cannot compile a step.

    `batch_size` is the number of images in a tower's batch.
    """
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        if getattr(error, "__notes__", ()):  # It was raised by a user's hook.
            raise
        raise UsageError(
            f"--batch_size {batch_size}: a step does not fit into the memory of its "
            f"device. Try half this batch size. {how_to_resume()}"
        ) from error
    except tf.errors.OpError as error:
        if not re.search(_OF_XLA, error.message):
            raise
        raise UsageError(
            f"--xla: XLA cannot compile this step: {error.message}\nLeave --xla out, "
            "and give --fresh or another --train_dir."
        ) from error
