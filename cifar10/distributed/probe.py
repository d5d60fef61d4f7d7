"""Finds the workers whose machine or network is gone while a step hangs.

TensorFlow's heartbeats go to the chief alone, and Linux takes a quarter of an hour to
give up a connection between two other workers (TensorFlow 2.21).
"""

import errno
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from cifar10.distributed.cluster import Cluster, Worker

# A machine counts as gone if it does not answer so many times in a row: as long as
# TensorFlow's heartbeats may fail to arrive.
TIMES = 5
SECONDS_TO_ANSWER = 5.0
SECONDS_BETWEEN = 1.0
# A refusal is an answer, and a lack of file descriptors is no fault of the network.
_SILENCE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


class Probe:
    """Asks the other workers' ports whether they answer; sends no data.

    Their names are looked up once, while all are connected. A worker that does not
    answer even then, as behind a firewall, is never asked again.
    """

    def __init__(self, cluster: Cluster) -> None:
        others = cluster.other_workers
        with ThreadPoolExecutor(len(others)) as pool:
            found = zip(others, pool.map(_address, others), strict=True)
            self._addresses = {worker: address for worker, address in found if address}

    def unreachable(self) -> list[Worker]:
        """Returns the workers that do not answer; at once if all do."""
        silent = self._addresses
        for asked in range(TIMES if silent else 0):
            time.sleep(SECONDS_BETWEEN if asked else 0)
            with ThreadPoolExecutor(len(silent)) as pool:
                answers = [*pool.map(_answers, silent.values())]
            found = zip(silent.items(), answers, strict=True)
            silent = {
                worker: address for (worker, address), is_there in found if not is_there
            }
            if not silent:
                break
        return [*silent]


def _address(worker: Worker) -> tuple[str, int] | None:
    """Returns a worker's numeric address; None if nothing answers there."""
    host, port = worker.host_and_port
    try:
        with socket.create_connection((host, port), SECONDS_TO_ANSWER) as connection:
            return connection.getpeername()[:2]
    except OSError:
        return None


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, SECONDS_TO_ANSWER).close()
    except OSError as error:
        return not isinstance(error, TimeoutError) and error.errno not in _SILENCE
    return True
