"""The configuration of a run: one frozen dataclass, from which the flags are made.

A field is a name, a type, a default and a help text in one place. `config.json` in the
run directory is this class written down, with the versions that ran it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from cifar10.errors import UsageError

TRAIN_DIR = "/tmp/cifar10_train"  # noqa: S108 - the tutorial's default.

# Seeds are 32-bit where the shuffled order is drawn.
_LARGEST_SEED = 2**31 - 1
# What a training adds to its configuration in `config.json`, as far as others read it.
RECORDED = {"parameters": int, "simulated": bool, "global_batch_size": int}
# What an evaluation cannot do without.
_NEEDED = {"model", "precision", "data", "data_dir", "data_url", "max_steps", *RECORDED}

# Far above what makes sense; a larger number is a slip of the finger.
_MOST_TOWERS = 64
_MOST_STEPS = 10**12
_LARGEST_RATE = 1e30


def _option(
    default: Any,
    help_text: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    determines_result: bool = False,
) -> Any:
    """Declares a field of `Config`.

    Args:
        default: Its value where the flag is not given.
        help_text: What it means, with its unit.
        choices: The values it may take.
        minimum: The least value it may take.
        maximum: The largest value it may take.
        determines_result: Whether a run may only be resumed with the same value.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "help": help_text,
            "choices": choices,
            "minimum": minimum,
            "maximum": maximum,
            "determines_result": determines_result,
        },
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a training run depends on; see each field's help."""

    num_gpus: int | None = _option(
        None,
        "towers, one per GPU; without a GPU they are simulated on the CPU "
        "(default: all GPUs found, else 1 tower on the CPU)",
        minimum=1,
        maximum=_MOST_TOWERS,
    )
    batch_size: int = _option(
        128,
        "images per tower and step; the global batch is this times --num_gpus",
        minimum=1,
    )
    max_steps: int = _option(
        100_000,
        "synchronous updates to reach, those before a resume included",
        minimum=1,
    )
    train_dir: str = _option(
        TRAIN_DIR,
        "directory of the run: checkpoints, event files, metrics.jsonl; "
        "starting again with the same one resumes it",
    )
    fresh: bool = _option(
        False, "begin anew: an earlier run in --train_dir is moved aside, not deleted"
    )
    model: str = _option(
        "tutorial",
        "`tutorial`, or module:function for one of your own that takes (image_shape, "
        "classes) and returns a Keras model",
        determines_result=True,
    )
    data: str = _option(
        "auto",
        "data set; auto: CIFAR-10 from --data_dir, else downloaded, else the stand-in",
        choices=("auto", "cifar10", "cifar100", "synthetic"),
        determines_result=True,
    )
    data_dir: str | None = _option(
        None,
        "folder with the .bin files, with cifar-10-batches-bin/ or with the archive "
        "(default: $CIFAR10_DATA_DIR, else ~/.cache/cifar10)",
    )
    data_url: str | None = _option(
        None,
        "where to download the archive from; several, in order, separated by commas",
    )
    distortions: str = _option(
        "tutorial",
        "of the training images; tutorial: crop, flip, brightness, contrast",
        choices=("tutorial", "crop_flip", "none"),
        determines_result=True,
    )
    precision: str = _option(
        "float32",
        "type of variables and arithmetic; float64 is for proofs, not for speed",
        choices=("float32", "float64"),
        determines_result=True,
    )
    learning_rate: float = _option(
        0.1,
        "of the first epochs",
        minimum=0.0,
        maximum=_LARGEST_RATE,
        determines_result=True,
    )
    epochs_per_decay: float = _option(
        350.0,
        "epochs after which the learning rate is multiplied by 0.1, again and again",
        minimum=1e-6,
        determines_result=True,
    )
    momentum: float = _option(
        0.0, "of the gradient descent", minimum=0.0, maximum=1.0, determines_result=True
    )
    moving_average_decay: float = _option(
        0.9999,
        "of the variables' averages, which evaluation uses",
        minimum=0.0,
        maximum=1.0,
        determines_result=True,
    )
    seed: int = _option(
        0,
        "of initial values, order and distortions",
        minimum=0,
        maximum=_LARGEST_SEED,
        determines_result=True,
    )
    deterministic: bool = _option(
        False,
        "make every operation repeat bit for bit on the same machine; slower",
        determines_result=True,
    )
    checkpoint_steps: int = _option(1000, "steps between two checkpoints", minimum=1)
    keep_checkpoints: int = _option(
        5, "checkpoints to keep; older ones are deleted", minimum=1
    )
    log_frequency: int = _option(
        10, "steps between two lines on the console", minimum=1
    )
    summary_steps: int = _option(
        100, "steps between two sets of histograms and images in TensorBoard", minimum=1
    )
    log_device_placement: bool = _option(
        False, "print on which device each operation of the step runs"
    )
    verbose: bool = _option(False, "show TensorFlow's own start-up messages")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_range(field, getattr(self, field.name))


def result_determining() -> list[str]:
    """Returns the names of the fields that a resumed run must not change."""
    return [
        field.name
        for field in dataclasses.fields(Config)
        if field.metadata["determines_result"]
    ]


def add_flags(
    parser: argparse.ArgumentParser, *, leave_out: Sequence[str] = ()
) -> None:
    """Adds a flag for every field of `Config`."""
    types = get_type_hints(Config)
    for field in dataclasses.fields(Config):
        if field.name in leave_out:
            continue
        help_text = field.metadata["help"].replace("%", "%%")
        if "default:" not in help_text:
            help_text += " (default: %(default)s)"
        if types[field.name] is bool:
            parser.add_argument(
                f"--{field.name}",
                action=argparse.BooleanOptionalAction,
                default=field.default,
                help=help_text,
            )
            continue
        parser.add_argument(
            f"--{field.name}",
            type=_converter(types[field.name]),
            default=field.default,
            choices=field.metadata["choices"],
            metavar=None if field.metadata["choices"] else _unit(types[field.name]),
            help=help_text,
        )


def from_flags(parser: argparse.ArgumentParser, **fixed: Any) -> Config:
    """Parses the command line; a bad value ends the program with exit code 2.

    Args:
        parser: A parser; flags for the fields that `fixed` does not name are added.
        **fixed: Fields that the script decides.
    """
    add_flags(parser, leave_out=tuple(fixed))
    values = vars(parser.parse_args())
    try:
        return Config(**values, **fixed)
    except UsageError as error:
        parser.error(str(error))


def read(path: Path) -> dict[str, Any]:
    """Reads a `config.json`.

    Raises:
        UsageError: It is missing, unreadable or not what this package writes.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            f"{path} does not exist, so {path.parent} is not the directory of a run."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} cannot be read ({error}). It describes the run in its directory; "
            "restore it, or begin anew with another --train_dir."
        ) from error
    types = get_type_hints(Config) | RECORDED
    if (
        not isinstance(values, dict)
        or not set(values) >= _NEEDED
        or not all(_is_a(values[name], types[name]) for name in types if name in values)
    ):
        raise UsageError(f"{path} is not a configuration that this package wrote.")
    return values


def _is_a(value: Any, hint: Any) -> bool:
    """Tells whether a value from JSON fits a type; a float may be written as an int."""
    if hint is float and isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _check_range(field: dataclasses.Field, value: Any) -> None:
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise UsageError(f"--{field.name} {value}: it is one of {', '.join(choices)}.")
    if value == "":
        raise UsageError(f"--{field.name}: it is empty.")
    if isinstance(value, str) and not value.isprintable():
        raise UsageError(f"--{field.name} {value!a}: it has unprintable characters.")
    if value is None or isinstance(value, bool | str):
        return
    minimum, maximum = field.metadata["minimum"], field.metadata["maximum"]
    if maximum is None and isinstance(value, int):
        maximum = _MOST_STEPS
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"--{field.name} {value}: it has to be a finite number.")
    if minimum is not None and value < minimum:
        raise UsageError(f"--{field.name} {value}: the least possible is {minimum}.")
    if maximum is not None and value > maximum:
        raise UsageError(f"--{field.name} {value}: the most possible is {maximum}.")


def _converter(hint: Any) -> type:
    """Returns the type of a flag's value, for `int`, `str | None` and so on."""
    if isinstance(hint, type):
        return hint
    return next(part for part in hint.__args__ if part is not type(None))


def _unit(hint: Any) -> str:
    return {int: "N", float: "X", str: "S"}[_converter(hint)]
