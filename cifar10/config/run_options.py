"""Options that several commands have in common."""

import dataclasses
from typing import Annotated, Any, TypeAlias

from cifar10.config.fields import TRAIN_DIR
from cifar10.config.options import Checked, Form, Range, option

# Images scored at a time: more are no faster, and others would sum in another order.
SCORED_BATCH_SIZE = 500
# In place of a step: the checkpoint with the best score.
BEST = "best"

_Step: TypeAlias = Annotated[str, Form(rf"\d{{1,12}}|{BEST}", f"a step, or {BEST}")]
Seconds: TypeAlias = Annotated[float, Range(1e-3, 86_400)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(Checked):
    """The options of a command that reads a checkpoint of a run."""

    train_dir: str = option(
        TRAIN_DIR, "directory of the run; the tutorial's --checkpoint_dir works too"
    )
    step: _Step | None = option(
        None, f"step of the checkpoint, or {BEST}, by its score (default: the newest)"
    )
    trust_model: str | None = option(
        None, "model to trust, as module:function, in a run not yours (default: none)"
    )


def data_dir() -> Any:
    """Declares where a command finds the data set."""
    return option(None, "directory of the data set (default: the run's)")


def use_averages() -> Any:
    """Declares which values of the variables a command uses."""
    return option(True, "use the variables' moving averages, not their last values")


def interval_secs(default: float) -> Any:
    """Declares how often a command that follows a run looks for a new checkpoint."""
    return option(default, "seconds between two looks for a new checkpoint")


def device() -> Any:
    """Declares the device that a command computes on."""
    return option("auto", "device to use: auto, cpu, gpu or gpu:NUMBER")
