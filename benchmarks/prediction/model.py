"""How long a synchronous step takes on many GPUs: arithmetic on plain numbers.

A step is the compute time of one tower, since all towers compute at once, and then the
averaging of their gradients. Nothing else is counted: no input, no update, and no
averaging of some gradients while others are still computed. The first two make real
training slower than predicted, the last makes it faster.

Units everywhere: seconds, bytes, bytes a second. A bandwidth may be infinite.
"""

from __future__ import annotations

# Besides one read per tower, a sum is written, then read and written again when it is
# divided by the number of towers.
_PASSES_OVER_THE_SUM = 3


def memory_average_seconds(
    towers: int, gradient_bytes: float, memory_bandwidth: float
) -> float:
    """Predicts how long the host's processor averages gradients in its own memory.

    Args:
        towers: Towers whose gradients lie in the memory; one has nothing to average.
        gradient_bytes: Bytes of one tower's gradients.
        memory_bandwidth: Bytes a second that the processor reads and writes.

    Returns:
        Seconds.
    """
    if towers == 1:
        return 0.0
    return (towers + _PASSES_OVER_THE_SUM) * gradient_bytes / memory_bandwidth


def memory_copies_seconds(
    copies: int, variable_bytes: float, memory_bandwidth: float
) -> float:
    """Predicts how long copies of the variables take within the host's memory.

    Args:
        copies: Copies of all variables, each read once and written once.
        variable_bytes: Bytes of the variables.
        memory_bandwidth: Bytes a second that the processor reads and writes.

    Returns:
        Seconds.
    """
    return 2 * copies * variable_bytes / memory_bandwidth


def ring_all_reduce_seconds(
    gpus: int,
    gradient_bytes: float,
    *,
    gpus_per_machine: int,
    link_bandwidth: float,
    link_latency: float,
    network_bandwidth: float,
    network_latency: float,
) -> float:
    """Predicts an all-reduce around a ring through all GPUs, as NCCL does it.

    With N GPUs it takes 2 (N - 1) steps. In each, every GPU sends an N-th of the
    gradients to its neighbour, as fast as the slowest link of the ring allows. The
    latencies add up along the ring: with M machines, 2 (M - 1) steps cross the network,
    the others stay within a machine. This is how NCCL itself estimates it
    (`src/graph/tuning.cc`); for small gradients on many machines NCCL takes a tree
    instead, which waits less.

    Args:
        gpus: GPUs in the ring; one has nothing to exchange.
        gradient_bytes: Bytes of one GPU's gradients.
        gpus_per_machine: GPUs in a machine; the last machine may have fewer.
        link_bandwidth: Bytes a second one way between neighbours within a machine.
        link_latency: Seconds until a step between them begins to arrive.
        network_bandwidth: Bytes a second one way between two machines.
        network_latency: Seconds until a step between machines begins to arrive.

    Returns:
        Seconds.
    """
    if gpus == 1:
        return 0.0
    count = machines(gpus, gpus_per_machine)
    steps, network_steps = 2 * (gpus - 1), 2 * (count - 1)
    links = []
    if count > 1:
        links.append(network_bandwidth)
    if count < gpus:
        links.append(link_bandwidth)
    return (
        steps / gpus * gradient_bytes / min(links)
        + (steps - network_steps) * link_latency
        + network_steps * network_latency
    )


def cpu_averaging_seconds(
    gpus: int,
    gradient_bytes: float,
    *,
    gpus_per_machine: int,
    host_link_bandwidth: float,
    host_link_latency: float,
    memory_bandwidth: float,
    network_bandwidth: float,
    network_latency: float,
) -> float:
    """Predicts an averaging in the memory of the host, as our towers do it.

    1) Every GPU sends its gradients to the host over a link of its own; all at once,
    but together no faster than the host's memory. 2) The host averages them. 3) Several
    machines exchange their averages around a ring. 4) Every GPU fetches the variables,
    as it sent its gradients. One GPU is not charged: its variables live on it.

    Args:
        gpus: GPUs in all machines.
        gradient_bytes: Bytes of one GPU's gradients, and of the variables.
        gpus_per_machine: GPUs in a machine; the last machine may have fewer.
        host_link_bandwidth: Bytes a second one way between one GPU and its host.
        host_link_latency: Seconds until a transfer between them begins to arrive.
        memory_bandwidth: Bytes a second that the host's memory reads and writes.
        network_bandwidth: Bytes a second one way between two machines.
        network_latency: Seconds until a step between machines begins to arrive.

    Returns:
        Seconds.
    """
    if gpus == 1:
        return 0.0
    towers = min(gpus, gpus_per_machine)
    transfer = host_link_latency + max(
        gradient_bytes / host_link_bandwidth, towers * gradient_bytes / memory_bandwidth
    )
    exchange = ring_all_reduce_seconds(
        machines(gpus, gpus_per_machine),
        gradient_bytes,
        gpus_per_machine=1,
        link_bandwidth=network_bandwidth,
        link_latency=network_latency,
        network_bandwidth=network_bandwidth,
        network_latency=network_latency,
    )
    average = memory_average_seconds(towers, gradient_bytes, memory_bandwidth)
    return 2 * transfer + average + exchange


def machines(gpus: int, gpus_per_machine: int) -> int:
    """Returns how many machines it takes to hold all GPUs."""
    return -(-gpus // gpus_per_machine)


def images_per_second(
    gpus: int, batch_size: int, compute_seconds: float, averaging_seconds: float
) -> float:
    """Predicts the throughput of all GPUs together.

    Args:
        gpus: GPUs, one tower on each.
        batch_size: Images per tower and step.
        compute_seconds: What one tower computes in a step.
        averaging_seconds: What follows until the next step may begin.

    Returns:
        Images a second.
    """
    return gpus * batch_size / (compute_seconds + averaging_seconds)


def efficiency(compute_seconds: float, averaging_seconds: float) -> float:
    """Returns the part of linear scaling that is kept, 0 to 1."""
    return compute_seconds / (compute_seconds + averaging_seconds)


def least_compute_seconds(averaging_seconds: float, kept: float) -> float:
    """Returns what a tower has to compute in a step to keep a part of linear scaling.

    Args:
        averaging_seconds: What the averaging of a step takes.
        kept: Part of linear scaling, above 0 and below 1.

    Returns:
        Seconds.
    """
    return averaging_seconds * kept / (1 - kept)
