"""What was found out about a machine, and one piece of advice."""

from __future__ import annotations

import dataclasses
import re

from cifar10.tools.doctor.libraries import Libraries
from cifar10.tools.doctor.machine import Machine
from cifar10.tools.doctor.nvidia import Nvidia
from cifar10.tools.doctor.ports import Ports
from cifar10.tools.doctor.probe import Probe

# The ways on that several pieces of advice name.
INSTALL = "pip install 'tensorflow[and-cuda]==2.21.*'"
ON_CPU = "To train on the CPU meanwhile, put CUDA_VISIBLE_DEVICES=-1 before the command"


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that was found out about a machine."""

    machine: Machine
    ports: Ports
    nvidia: Nvidia
    libraries: Libraries
    probe: Probe

    @property
    def gpus(self) -> int:
        """How many NVIDIA GPUs we should be able to use, whether or not they work."""
        seen = max(len(self.nvidia.device_files), len(self.nvidia.gpus))
        if seen and self.machine.container:
            # It sees all the host's GPUs on the bus, and was given some of them.
            return seen
        return max(seen, len(self.nvidia.pci)) or int(self.nvidia.wsl_driver)

    @property
    def built_for(self) -> list[tuple[int, int]]:
        """The compute capabilities that TensorFlow was built for, in order."""
        names = self.probe.view.built_for if self.probe.view else ()
        digits = [re.sub(r"\D", "", name) for name in names]
        return sorted(
            (int(text[:-1]), int(text[-1])) for text in digits if len(text) > 1
        )


@dataclasses.dataclass(frozen=True)
class Advice:
    """One thing that is wrong, or worth knowing.

    Attributes:
        finding: What was found.
        fix: What to do.
        broken: Whether it is wrong; otherwise it is only worth knowing.
    """

    finding: str
    fix: str
    broken: bool = True

    def __str__(self) -> str:
        kind = "PROBLEM" if self.broken else "NOTE"
        return f"{kind}: {self.finding} FIX: {self.fix}"
