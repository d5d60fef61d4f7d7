"""The HTTP server: uvicorn, with a deadline for headers and room for new clients.

Uvicorn gives a client any time for a request's headers, and its `limit_concurrency`
turns away new clients for as long as others stay; see
`docs/decisions/0014-connections.md`.
"""

import asyncio
import functools
import math
import resource
import socket
import time
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from cifar10.errors import UsageError, reason, say

_MAX_CONNECTIONS = 2_000  # Far more than one model answers.
# Files of TensorFlow, of the run, and of the processes that decode: some 50.
_OTHER_FILES = 128
# Time for the answers under way after SIGTERM. Containers are killed after 10 s, and
# pictures that are then being decoded may use up the time that they have.
_SHUTDOWN_SECONDS = 7


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address.

    Raises:
        UsageError: This is not possible.
    """
    try:
        host.encode("idna")  # `socket` raises a TypeError for an impossible name.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        # Inherited by each connection. asyncio sets it only where the listener's
        # protocol is spelt out, and an answer's body would wait for the head's receipt.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener  # noqa: TRY300
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"--host {host} --port {port}: cannot listen there: {reason(error)}.\n"
            "Choose another --port, or 0 for any free one."
        ) from error


def create_server(application: ASGIApp, header_seconds: float) -> uvicorn.Server:
    """Returns a server of an application, ready to run on a listening socket.

    Args:
        application: What answers the requests.
        header_seconds: How long a client may take for a request's headers, from the
            opening of its connection or the previous answer; ended within a second.
    """
    limit = connection_limit()

    async def end_idle() -> None:
        oldest = time.monotonic() - header_seconds
        connections: list[Any] = [*server.server_state.connections]
        for connection in connections:
            if connection.is_idle() and connection.waits_since < oldest:
                connection.end()

    server = uvicorn.Server(
        uvicorn.Config(
            application,
            loop="asyncio",  # uvloop accepts any number of connections at a time.
            http=_Connection,
            limit_concurrency=limit,
            # asyncio accepts as many at a time, and up to four times as many before it
            # lets the first of them make room.
            backlog=limit // 4,
            timeout_keep_alive=math.ceil(header_seconds),
            callback_notify=end_idle,
            timeout_notify=0,  # It looks once a second.
            ws="none",
            lifespan="off",
            # The process logs already; a second set-up would close absl's stream.
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
    )
    return server


def connection_limit() -> int:
    """Returns how many connections may be open: half of the files that may be."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(8, min(_MAX_CONNECTIONS, (files - _OTHER_FILES) // 2))


class _Connection(H11Protocol):
    """A connection that may end while it waits for its client.

    When a connection would exceed the limit, those end that have waited longest for
    their clients. A request that has arrived is always answered.
    """

    waits_since = 0.0  # When it was opened or last answered, monotonic.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Makes room."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.waits_since = time.monotonic()
        # Uvicorn would answer 503 at this limit.
        limit, self.limit_concurrency = self.limit_concurrency, None
        if limit and len(self.connections) >= limit:
            self._make_room(limit)

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        self.waits_since = time.monotonic()
        super().on_response_complete()

    def is_idle(self) -> bool:
        """Returns whether it waits for a request's headers."""
        return self.cycle is None or self.cycle.response_complete

    def is_stalled(self) -> bool:
        """Returns whether the next step is the client's, not the service's."""
        return self.is_idle() or self.cycle.more_body or self.flow.write_paused

    def end(self) -> None:
        """Closes the connection, whatever its client has not read yet."""
        self.connections.discard(self)  # `connection_lost` comes later.
        self.transport.abort()

    def _make_room(self, limit: int) -> None:
        _warn_once(limit)
        connections: list[Any] = [*self.connections]
        stalled = [each for each in connections if each.is_stalled()]
        stalled.sort(key=lambda each: each.waits_since)
        # Several at a time, because looking for them takes long.
        for connection in stalled[: 1 + len(stalled) // 8]:
            connection.end()


@functools.cache
def _warn_once(limit: int) -> None:
    say(
        f"{limit} connections are too many; those end that wait longest for their "
        "clients."
    )
