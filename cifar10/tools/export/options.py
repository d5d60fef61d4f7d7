"""The options of `python -m cifar10 export`."""

import dataclasses

from cifar10.config import common
from cifar10.config.options import check, option


@dataclasses.dataclass(frozen=True)
class Options:
    """What to export and where; see each field's help."""

    train_dir: str = common.train_dir()
    format: str = option("savedmodel", "what to write", choices=("savedmodel", "onnx"))
    output: str = option(
        dataclasses.MISSING, "folder (savedmodel) or file (onnx) to make"
    )
    step: int | None = option(None, "step of the checkpoint (default: the newest)")
    with_preprocessing: bool = option(False, "take uint8 images, give probabilities")
    use_averages: bool = common.use_averages()
    trust_model: str | None = common.trust_model()
    data_dir: str | None = common.data_dir()

    def __post_init__(self) -> None:
        check(self)
