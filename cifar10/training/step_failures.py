"""Turns TensorFlow's errors in a step into advice for the user."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from cifar10.config import data_flag, fields
from cifar10.config.config import Config, ResolvedConfig
from cifar10.errors import UsageError
from cifar10.process import invocation

# These occur in TensorFlow's error if XLA cannot compile a step; the third if cuDNN has
# no convolution that XLA can use, the last for variables of int32 beside a GPU.
_OF_XLA = "tf2xla|libdevice|could not find any supported configs|Trying to access"


@contextlib.contextmanager
def explaining_failures(
    config: ResolvedConfig, how_to_resume: Callable[[], str]
) -> Iterator[None]:
    """Raises a `UsageError` if memory runs out or XLA cannot compile a step."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        if getattr(error, "__notes__", ()):  # It was raised by a user's hook.
            raise
        raise UsageError(
            f"--batch_size {config.batch.batch_size}: a step does not fit in the "
            f"memory of its device. {_advise(config)}\n{how_to_resume()}"
        ) from error
    except tf.errors.OpError as error:
        if not re.search(_OF_XLA, error.message):
            raise
        flag = "xla" if config.speed.xla else "xla_update"
        raise UsageError(
            f"--{flag}: XLA cannot compile this step: {error.message}\nGive "
            f"--no-{flag}, and --fresh or another --train_dir."
        ) from error


def _advise(config: ResolvedConfig) -> str:
    """Returns what to try, with the command that estimates the largest batch."""
    advice, values = "Try half this batch size.", config.values
    own = invocation.in_memory(model=values["model"], data=values["data"])
    if own or not isinstance(values["optimizer"], str):
        return advice  # Commands have no objects of a program.
    values["global_batch_size"] = None  # `batch_size` agrees with it.
    if values["data"] in data_flag.KINDS:
        values["data"] = values["data_dir"]
    usual: dict[str, Any] = {"recipe": values["recipe"]}
    with contextlib.suppress(UsageError):  # The recipe's file may be gone.
        usual = {**Config(recipe=values["recipe"]).values, "recipe": None}
    usual["batch_size"] = None  # Always given.
    shown = [n for n in fields.PLANNED if values[n] not in (None, usual.get(n))]
    flags = invocation.as_flags(**{name: values[name] for name in shown})
    plan = f"{invocation.command('plan')} {flags}"
    return f"{advice} An estimate of what fits:\n    {plan}"
