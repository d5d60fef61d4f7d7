"""Chooses who shares variables, and the strategy of `tf.distribute` for that."""

import tensorflow as tf

from cifar10.distributed import rendezvous
from cifar10.distributed.cluster import Cluster
from cifar10.errors import UsageError
from cifar10.towers.devices import Placement


def choose(
    variable_update: str,
    placement: Placement,
    cluster: Cluster | None,
    timeout: float,
) -> tuple[tf.distribute.Strategy | None, int]:
    """Chooses who shares variables, and connects the workers within `timeout` seconds.

    It has to run before TensorFlow's first operation. With `towers` all towers of a
    machine share its variables; with `mirrored` each tower has its own; with `auto`
    each GPU has its own if there are several machines.

    Returns the strategy, None for one set of variables in one process, and how many
    sets of variables this process has.
    """
    # NCCL does not take two towers on one GPU.
    gpus = placement.on_gpus and not placement.simulated
    mirrored = variable_update == "mirrored" or (
        variable_update == "auto" and cluster is not None and gpus
    )
    towers = len(placement.devices)
    if cluster is None:
        if not mirrored:
            return None, 1
        return tf.distribute.MirroredStrategy(
            placement.devices,
            # On GPUs TensorFlow chooses NCCL. Elsewhere it would choose collectives,
            # whose numbers two trainings in one process would have in common.
            None if gpus else tf.distribute.ReductionToOneDevice(),
        ), towers
    if mirrored and not gpus and towers > 1:
        raise UsageError(
            f"--variable_update mirrored: on several machines TensorFlow mirrors "
            "variables on whole GPUs or on one device of a CPU,\nand here "
            f"{towers} towers share one. Leave it out, or give --num_gpus 1."
        )
    strategy = rendezvous.connect(
        cluster, gpus=towers if mirrored and gpus else 0, timeout=timeout
    )
    return strategy, towers if mirrored else 1
