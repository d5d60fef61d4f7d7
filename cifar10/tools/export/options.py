"""The options of `python -m cifar10 export`."""

import dataclasses

from cifar10.config import shared_options
from cifar10.config.options import check, option
from cifar10.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Options:
    """What to export and where; see each field's help."""

    train_dir: str = shared_options.train_dir()
    format: str = option(
        "savedmodel",
        "what to write",
        choices=("savedmodel", "onnx", "keras", "litert"),
    )
    output: str = option(
        dataclasses.MISSING, "folder (savedmodel) or file (others) to make"
    )
    step: str | None = shared_options.step()
    with_preprocessing: bool = option(False, "take uint8 images, give probabilities")
    quantize: str = option(
        "none", "litert: compute in integers", choices=("none", "int8")
    )
    use_averages: bool = shared_options.use_averages()
    trust_model: str | None = shared_options.trust_model()
    data_dir: str | None = shared_options.data_dir()

    def __post_init__(self) -> None:
        check(self)
        if self.format == "keras" and not self.output.endswith(".keras"):
            raise UsageError(
                f"--output {self.output}: Keras opens only files whose names end in "
                f".keras.\nGive --output {self.output}.keras."
            )
        if self.quantize == "none":
            return
        if self.format != "litert":
            raise UsageError(
                f"--quantize {self.quantize}: --format {self.format} is written in "
                "float32.\nAdd --format litert, or leave --quantize out."
            )
        if self.with_preprocessing:
            raise UsageError(
                f"--quantize {self.quantize} --with_preprocessing: integers of 8 bits "
                "are too coarse to resize and standardize images.\nLeave one of them "
                "out; without --with_preprocessing the description says how to prepare "
                "images."
            )
