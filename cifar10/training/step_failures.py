"""Turns TensorFlow's errors in a step into advice for the user."""

import contextlib
import re
from collections.abc import Callable, Iterator

import tensorflow as tf

from cifar10.errors import UsageError

# Part of XLA's error message if cuDNN has no convolution that it can use.
_NO_CUDNN = "could not find any supported configs"


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
        if not (why := _why_not_compiled(error.message)):
            raise
        raise UsageError(
            f"--xla: XLA cannot compile this step: {why}\nLeave --xla out, and give "
            "--fresh or another --train_dir."
        ) from error


def _why_not_compiled(message: str) -> str:
    """Returns why XLA could not compile a step, or "" for any other error message."""
    if _NO_CUDNN in message:
        return (
            "it finds no convolution in this cuDNN. XLA needs cuDNN 9.24 or newer, "
            "which GPUs of compute capability below 7.5 cannot use."
        )
    if not re.search("tf2xla|libdevice", message):
        return ""
    # The cause is the line before the graph; with several towers it has a number.
    cause = re.split(r"\n(?:\t|The op is)", message)[0].rpartition("\n")[2]
    return re.sub(r"^ *\(0\) \w+: *|{{.*?}}", "", cause)
