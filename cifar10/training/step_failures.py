"""TensorFlow's errors about a step, as advice to the user."""

import contextlib
import re
from collections.abc import Callable, Iterator

import tensorflow as tf

from cifar10.errors import UsageError

# A part of XLA's error if no convolution of cuDNN suits it.
_NO_CUDNN = "could not find any supported configs"


@contextlib.contextmanager
def explaining_failures(
    batch_size: int, how_to_resume: Callable[[], str]
) -> Iterator[None]:
    """Raises a `UsageError` where memory is short or XLA cannot compile a step.

    `batch_size` is that of a tower.
    """
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        if getattr(error, "__notes__", ()):  # It was raised by a user's hook.
            raise
        raise UsageError(
            f"--batch_size {batch_size}: a step does not fit into the memory of its "
            f"device. Try half of it. {how_to_resume()}"
        ) from error
    except tf.errors.OpError as error:
        if not (why := _why_not_compiled(error.message)):
            raise
        raise UsageError(
            f"--xla: XLA cannot compile this step: {why}\nLeave it out, with "
            "--fresh or another --train_dir."
        ) from error


def _why_not_compiled(message: str) -> str:
    """Returns XLA's reason in an error of TensorFlow's; empty if there is none."""
    if _NO_CUDNN in message:
        return (
            "it finds no convolution in this cuDNN; it wants 9.24 or newer, which "
            "GPUs of compute capability below 7.5 cannot use."
        )
    if not re.search("tf2xla|libdevice", message):
        return ""
    # The cause stands before the graph; with several towers it is numbered.
    cause = re.split(r"\n(?:\t|The op is)", message)[0].rpartition("\n")[2]
    return re.sub(r"^ *\(0\) \w+: *|{{.*?}}", "", cause)
