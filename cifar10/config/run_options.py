"""Declares the options that several commands share."""

import dataclasses
from typing import Annotated, Literal, TypeAlias

from cifar10.config.fields import TRAIN_DIR
from cifar10.config.options import Checked, Form, Range

# Images per batch of an evaluation. Larger are no faster; the size affects rounding.
SCORED_BATCH_SIZE = 500
# The value of --step that stands for the checkpoint with the best score.
BEST = "best"

_Step: TypeAlias = Annotated[str, Form(rf"\d{{1,12}}|{BEST}", f"a step, or {BEST}")]
Seconds: TypeAlias = Annotated[float, Range(1e-3, 86_400)]
Device: TypeAlias = Literal["auto", "cpu", "gpu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(Checked):
    """The options of a command that reads a checkpoint of a run.

    Attributes:
        train_dir: directory of the run; the flag --checkpoint_dir has the same meaning
        step: step of the checkpoint, or best for the best score (default: the newest)
        trust_model: module:function of a model that others trained, if you trust it
    """

    train_dir: str = TRAIN_DIR
    step: _Step | None = None
    trust_model: str | None = None
