"""Hides ports that are only for workers of this machine from the network."""

import contextlib
import os
import re
import socket
from pathlib import Path

_LOOPBACK = r"::1|(::ffff:)?127(\.\d+){3}"


def confine(port: int) -> bool:
    """Lets no other machine reach a port at which this process listens.

    TensorFlow's server listens at all of a machine's addresses, whichever its worker
    was given (TensorFlow 2.21). Linux, from 5.7 on, binds an open socket to a device
    as well; connections that came from elsewhere until then are cut.

    Returns whether it could.
    """
    confined = False
    for opened in Path("/proc/self/fd").glob("*"):  # None where this is not Linux.
        # A descriptor may be closed meanwhile, or not be connected.
        with contextlib.suppress(OSError):
            if not opened.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(opened.name))) as one:
                if one.getsockname()[1:2] != (port,):
                    continue
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
                    confined = True
                elif not re.fullmatch(_LOOPBACK, one.getpeername()[0]):
                    one.shutdown(socket.SHUT_RDWR)
    return confined
