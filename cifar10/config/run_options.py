"""Options that several commands have in common."""

import dataclasses
from typing import Annotated, TypeAlias

from cifar10.config.fields import TRAIN_DIR
from cifar10.config.options import Checked, Form, Range

# Images scored at a time: more are no faster, and others may round otherwise.
SCORED_BATCH_SIZE = 500
# In place of a step: the checkpoint with the best score.
BEST = "best"

_Step: TypeAlias = Annotated[str, Form(rf"\d{{1,12}}|{BEST}", f"a step, or {BEST}")]
Seconds: TypeAlias = Annotated[float, Range(1e-3, 86_400)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(Checked):
    """The options of a command that reads a checkpoint of a run.

    Attributes:
        train_dir: directory of the run; the tutorial's --checkpoint_dir works too
        step: step of the checkpoint, or best, by its score (default: the newest)
        trust_model: model to trust, as module:function, in a run not yours (default:
            none)
    """

    train_dir: str = TRAIN_DIR
    step: _Step | None = None
    trust_model: str | None = None
