"""Who reaches ports that are only for workers of this machine.

The network does not; the machine's other users do, unless a network namespace keeps
them out.
"""

import contextlib
import os
import re
import socket
from pathlib import Path

# The system's users are below the first person; systemd makes up more, 65534 is nobody.
_FIRST_PERSON, _MADE_UP = 1000, range(61_184, 65_536)
_OF_MACHINE = 0xEFFFFFFC  # Its namespace of processes, as in linux/proc_ns.h.
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


def has_other_users() -> bool:
    """Returns whether people other than this process's user may reach its ports.

    They may where they have processes, and where their processes would be hidden; not
    in a network namespace that was made for a command.
    """
    proc = Path("/proc")
    is_whole = (proc / "self/ns/pid").exists() and (proc / "1").exists()
    sees_machine = is_whole and (proc / "self/ns/pid").stat().st_ino == _OF_MACHINE
    # Of all network namespaces, only the machine's own has this setting.
    is_on_machine = (proc / "sys/net/core/dev_weight").exists() or not is_whole
    if sees_machine and not is_on_machine:
        return False
    users = set()
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            users.add(process.stat().st_uid)
    people = {uid for uid in users if uid >= _FIRST_PERSON and uid not in _MADE_UP}
    return bool(people - {os.geteuid()}) or (is_on_machine and not sees_machine)
