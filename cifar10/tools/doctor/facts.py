"""What was found out about a machine, and a piece of advice."""

import dataclasses
import re

from cifar10.tools.doctor.cuda_libraries import Library
from cifar10.tools.doctor.machine import Machine, Ports
from cifar10.tools.doctor.nvidia import Nvidia
from cifar10.tools.doctor.probe import Probe

# cuDNN 9.11 dropped the GPUs below; XLA needs the later one.
NEW_GPU = (7, 5)
OLD_CUDNN = "nvidia-cudnn-cu12==9.10.2.21"
NEW_CUDNN = "nvidia-cudnn-cu12>=9.24,<10"

# Parts of several pieces of advice.
DRIVER_555 = "driver 555 or newer (for Pascal and Volta 580, the last one)"
UNSET_LIBRARY_PATH = (
    "LD_LIBRARY_PATH puts other files before the wheels that fit: unset it, or remove "
    "their folders from it"
)
ON_CPU = "To train on the CPU meanwhile, put CUDA_VISIBLE_DEVICES=-1 before the command"


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that was found out about a machine."""

    machine: Machine
    ports: Ports
    nvidia: Nvidia
    libraries: tuple[Library, ...]
    probe: Probe

    @property
    def gpus(self) -> int:
        """How many NVIDIA GPUs there are, whether or not they work."""
        known = len(self.nvidia.gpus)
        if self.machine.container:
            # The bus has all GPUs of the host; the container may have fewer.
            return known or len(self.probe.gpus) or len(self.nvidia.pci)
        return max(known, len(self.nvidia.pci))

    @property
    def has_old_gpu(self) -> bool:
        """Whether a GPU, for TensorFlow or the driver, needs the old cuDNN."""
        known = (numbers(gpu.capability) for gpu in self.probe.gpus or self.nvidia.gpus)
        return any(() < capability < NEW_GPU for capability in known)

    @property
    def install(self) -> str:
        """The command that installs the libraries for the GPUs of this machine."""
        old = f" '{OLD_CUDNN}'" * self.has_old_gpu
        return f"pip install 'tensorflow[and-cuda]==2.21.*'{old}"


@dataclasses.dataclass(frozen=True)
class Advice:
    """A problem, or a note if nothing is broken, and what to do about it."""

    finding: str
    fix: str
    broken: bool = True

    def __str__(self) -> str:
        label = "PROBLEM" if self.broken else "NOTE"
        return f"{label}: {self.finding} FIX: {self.fix}"


def numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, to compare it: (9, 0) for `9.0`."""
    return tuple(int(number) for number in re.findall(r"\d+", version))
