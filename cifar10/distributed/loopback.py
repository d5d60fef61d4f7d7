"""Keeps what listens for workers of this machine alone away from its network."""

import contextlib
import os
import re
import socket
from pathlib import Path


def confine(port: int) -> bool:
    """Lets no other machine reach a port at which this process listens.

    TensorFlow's server listens at all of a machine's addresses, whichever its worker
    was given (TensorFlow 2.21). Linux, from 5.7 on, binds an open socket to a device
    as well; connections that came from elsewhere until then are cut.

    Returns whether it could.
    """
    confined = False
    with contextlib.suppress(OSError):  # There is no /proc: this is not Linux.
        for opened in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # It was closed, or is not connected.
                if opened.is_socket():
                    confined |= _confine(os.dup(int(opened.name)), port)
    return confined


def _confine(descriptor: int, port: int) -> bool:
    """Confines a socket if it is of the port, and closes this copy of its descriptor.

    Returns whether it listens there; an `OSError` if it cannot be confined.
    """
    with socket.socket(fileno=descriptor) as one:
        is_inet = one.family in (socket.AF_INET, socket.AF_INET6)
        if not is_inet or one.getsockname()[1] != port:
            return False
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
            return True
        if not re.fullmatch(r"::1|(::ffff:)?127(\.\d+){3}", one.getpeername()[0]):
            one.shutdown(socket.SHUT_RDWR)
        return False
