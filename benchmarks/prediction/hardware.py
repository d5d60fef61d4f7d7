"""Links between GPUs, hosts and machines, with the sources of their figures."""

from __future__ import annotations

import dataclasses
import math

from cifar10.errors import UsageError

_GIGA = 1e9
_MICRO = 1e-6


@dataclasses.dataclass(frozen=True)
class Link:
    """One way from one end to the other.

    Attributes:
        name: As a flag names it.
        bandwidth: Bytes a second, one way.
        latency: Seconds until something sent begins to arrive.
        source: Where the figures are from.
    """

    name: str
    bandwidth: float
    latency: float
    source: str


# What NCCL itself assumes for a step around a ring, protocol "Simple": `hwLat` in
# `src/graph/tuning.cc` of NCCL 2.8, in microseconds.
_NCCL_NVLINK_MICROSECONDS = 3.4
_NCCL_PCIE_MICROSECONDS = 5.7
_NCCL_NETWORK_MICROSECONDS = 9.6
_LATENCY_SOURCE = "latency: NCCL 2.8, src/graph/tuning.cc"

LINKS = {
    link.name: link
    for link in (
        Link(
            "pcie3",
            12.5e9,
            _NCCL_PCIE_MICROSECONDS * _MICRO,
            "half of PCIe 4; " + _LATENCY_SOURCE,
        ),
        Link(
            "pcie4",
            25e9,
            _NCCL_PCIE_MICROSECONDS * _MICRO,
            "nvbandwidth on an A100, 16 lanes, 24.8 GB/s (forums.developer.nvidia.com, "
            "thread 352186); " + _LATENCY_SOURCE,
        ),
        Link(
            "pcie5",
            50e9,
            _NCCL_PCIE_MICROSECONDS * _MICRO,
            "twice PCIe 4; " + _LATENCY_SOURCE,
        ),
        Link(
            "nvlink3",
            235e9,
            _NCCL_NVLINK_MICROSECONDS * _MICRO,
            "A100: 300 GB/s by its data sheet, of which NCCL 2.8 expects at most 235 "
            "(src/graph/tuning.cc); " + _LATENCY_SOURCE,
        ),
        Link(
            "nvlink4",
            450e9,
            _NCCL_NVLINK_MICROSECONDS * _MICRO,
            "H100 and H200: 900 GB/s both ways by their data sheets; "
            + _LATENCY_SOURCE,
        ),
        Link(
            "ethernet100",
            12.5e9,
            _NCCL_NETWORK_MICROSECONDS * _MICRO,
            "100 Gbit/s, its line rate; " + _LATENCY_SOURCE,
        ),
        Link(
            "ethernet400",
            50e9,
            _NCCL_NETWORK_MICROSECONDS * _MICRO,
            "400 Gbit/s, its line rate; " + _LATENCY_SOURCE,
        ),
    )
}

# Eight channels of DDR4-3200, one socket of the A100's usual hosts, move 204.8 GB/s by
# their clock, of which programs such as STREAM reach about three quarters.
HOST_MEMORY_BANDWIDTH = 150e9


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The machines a prediction is for.

    Attributes:
        gpus_per_machine: GPUs in each of several machines.
        host_link: Between one GPU and the memory of its host.
        within: Between neighbouring GPUs of one machine.
        network: Between two machines.
        memory_bandwidth: Bytes a second that a host's memory reads and writes.
    """

    gpus_per_machine: int
    host_link: Link
    within: Link
    network: Link
    memory_bandwidth: float


def parse_link(flag: str, text: str) -> Link:
    """Reads a link from a flag.

    Args:
        flag: The flag, for messages.
        text: A name in `LINKS`, or gigabytes a second and microseconds of latency with
            a colon between them.

    Raises:
        UsageError: It is neither.
    """
    if text in LINKS:
        return LINKS[text]
    bandwidth, _, latency = text.partition(":")
    try:
        gigabytes, microseconds = float(bandwidth), float(latency)
    except ValueError:
        raise UsageError(
            f"{flag} {text}: it is one of {', '.join(LINKS)}, or gigabytes a second "
            "and microseconds of latency, such as 25:10."
        ) from None
    if not (math.isfinite(gigabytes) and gigabytes > 0):
        raise UsageError(
            f"{flag} {text}: the gigabytes a second have to be finite and above 0; "
            "try 25:10."
        )
    if not (math.isfinite(microseconds) and microseconds >= 0):
        raise UsageError(
            f"{flag} {text}: the microseconds of latency have to be finite and not "
            "below 0; try 25:10."
        )
    return Link(text, gigabytes * _GIGA, microseconds * _MICRO, "given by the flag")
