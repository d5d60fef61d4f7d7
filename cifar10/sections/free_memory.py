"""How much memory a step may take."""

from __future__ import annotations

import math
import resource
from pathlib import Path

from tensorflow.python.client import device_lib

from cifar10.towers import hardware
from cifar10.towers.devices import Placement


def free_memory(placement: Placement) -> float:
    """Returns how many bytes a GPU has for its tower, or the CPU for all towers.

    Without end where that cannot be found out.
    """
    if placement.on_gpus:
        # Whatever limits a device, this lists what is left to it.
        limits = {
            device.name.lower(): device.memory_limit
            for device in device_lib.list_local_devices()
        }
        return min(limits[f"/device:{name[1:]}"] for name in placement.devices)
    available = hardware.memory().available
    found = [math.inf if available is None else available]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        # TensorFlow's allocator reserves regions, each twice as large as the last.
        found.append((limit - pages * resource.getpagesize()) / 2)
    return min(found)
