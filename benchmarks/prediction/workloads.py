"""What a tower computes and sends in a step: models whose speed others published."""

from __future__ import annotations

import dataclasses

MEASURED, GIVEN = "measured here", "given by --step_ms"
PUBLISHED, ESTIMATED = "published", "estimated"
_FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Workload:
    """One model on one kind of device.

    Attributes:
        name: Model and device.
        gradient_bytes: Bytes of one tower's gradients, and of the variables.
        batch_size: Images per tower and step.
        compute_seconds: What a tower computes in a step, forward and backward.
        kind: Where the compute time is from: `MEASURED`, `GIVEN`, `PUBLISHED` or
            `ESTIMATED`.
        source: The same in more words.
        operations: Floating-point operations of a step, a multiplication and an
            addition counted as two; None if they are not known.
        on_eight_gpus: Published images a second of 8 GPUs in one box, if there are any.
    """

    name: str
    gradient_bytes: int
    batch_size: int
    compute_seconds: float
    kind: str
    source: str
    operations: float | None = None
    on_eight_gpus: float | None = None


# The tutorial's network: its parameters, and 111 million operations an image, forward
# and backward, on 24 x 24 images.
_TUTORIAL_BYTES = 1_068_298 * _FLOAT32_BYTES
_TUTORIAL_BATCH_SIZE = 128  # The script's default.
TUTORIAL_OPERATIONS_PER_IMAGE = 111e6
_TUTORIAL_OPERATIONS = TUTORIAL_OPERATIONS_PER_IMAGE * _TUTORIAL_BATCH_SIZE

# Filters, biases of batch norm and whitening, and head of airbench94: those of
# `CifarNet` in airbench94_muon.py that are trained.
_AIRBENCH94_PARAMETERS = (
    9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256)
    + 2 * (64 + 256 + 256)
    + 24
    + 256 * 10
)
# 8 epochs of 25 steps of 2,000 images in 2.59 s, of which a little is not steps.
_AIRBENCH94_BATCH_SIZE = 2000
_AIRBENCH94_STEP_SECONDS = 2.59 / (8 * 25)
# Multiplications and additions of its convolutions on 31 x 31, 15 x 15, 7 x 7 and
# 3 x 3 pixels; a backward pass takes twice as many as a forward pass.
_AIRBENCH94_OPERATIONS = (3 * 2 * _AIRBENCH94_BATCH_SIZE) * (
    31**2 * (12 * 24 + 9 * 24 * 64)
    + 15**2 * (9 * 64 * 64 + 9 * 64 * 256)
    + 7**2 * (2 * 9 * 256 * 256)
    + 3**2 * (9 * 256 * 256)
)

# torchvision's and NVIDIA's ResNet-50, without moving statistics; 4.1 billion
# multiplications and additions for a 224 x 224 image, forward.
_RESNET50_BYTES = 25_557_032 * _FLOAT32_BYTES
_RESNET50_BATCH_SIZE = 256
_RESNET50_OPERATIONS = 3 * 2 * 4.1e9 * _RESNET50_BATCH_SIZE


def _resnet50(precision: str, on_one: float, on_eight: float) -> Workload:
    return Workload(
        f"ResNet-50, {precision}, A100",
        _RESNET50_BYTES,
        _RESNET50_BATCH_SIZE,
        _RESNET50_BATCH_SIZE / on_one,
        PUBLISHED,
        f"{on_one:,} images/s in TensorFlow 20.06 with XLA on a DGX A100, "
        "NVIDIA/DeepLearningExamples, TensorFlow/Classification/ConvNets/resnet50v1.5",
        _RESNET50_OPERATIONS,
        on_eight,
    )


_RESNET50_TF32 = _resnet50("TF32", on_one=909, on_eight=7000)

REFERENCES = (
    Workload(
        "the tutorial's CNN, GTX 1080",
        _TUTORIAL_BYTES,
        _TUTORIAL_BATCH_SIZE,
        _TUTORIAL_BATCH_SIZE / 8000,
        PUBLISHED,
        "8,000 images/s, tensorflow/models#1538",
        _TUTORIAL_OPERATIONS,
    ),
    Workload(
        "the tutorial's CNN, TF32, A100 at best",
        _TUTORIAL_BYTES,
        _TUTORIAL_BATCH_SIZE,
        _TUTORIAL_OPERATIONS / (_RESNET50_OPERATIONS / _RESNET50_TF32.compute_seconds),
        ESTIMATED,
        "as many operations a second as ResNet-50 in TF32 below; small layers reach "
        "fewer",
        _TUTORIAL_OPERATIONS,
    ),
    Workload(
        "airbench94, float16, A100",
        _AIRBENCH94_PARAMETERS * _FLOAT32_BYTES,
        _AIRBENCH94_BATCH_SIZE,
        _AIRBENCH94_STEP_SECONDS,
        PUBLISHED,
        "8 epochs in 2.59 s, KellerJordan/cifar10-airbench, airbench94_muon.py",
        _AIRBENCH94_OPERATIONS,
    ),
    _RESNET50_TF32,
    _resnet50("mixed precision", on_one=2375, on_eight=17400),
)
