"""A client's connection: how many there are at most, and how long each may stall.

Uvicorn gives a client any time for a request's head, and its `limit_concurrency` turns
away new clients for as long as others stay; see `docs/decisions/0014-connections.md`.
"""

import asyncio
import resource
import time
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from cifar10.errors import say

_MOST = 2_000  # Far more than one model answers.
# Of TensorFlow, of the run, and of the processes that decode: some 50.
_OTHER_FILES = 128
# For requests that are still arriving at SIGTERM; answers have longer.
_LAST_SECONDS = 2
_SECONDS_BETWEEN_LINES = 60.0


def limits() -> tuple[int, int]:
    """Returns the most connections, and how many the loop takes at a time.

    asyncio takes up to four times as many before it closes the first that is too many.
    Together they need half of the files that this process may open, and the other half.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        files = 2 * _MOST + _OTHER_FILES
    most = max(8, min(_MOST, (files - _OTHER_FILES) // 2))
    return most, most // 4


class Connection(H11Protocol):
    """Ends unless a request's head arrives within `timeout_keep_alive`.

    Where there would be `limit_concurrency` of them, those end that have waited longest
    for their clients: whoever stalls makes room.
    """

    since = 0.0  # Its opening or its last answer, monotonic.
    _deadline: asyncio.TimerHandle | None = None
    _next_line = 0.0  # Of all connections.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Makes room, and waits for the first request."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._await_head()
        most, self.limit_concurrency = self.limit_concurrency, None
        if most and len(self.connections) >= most:
            self._warn(most)
            connections = cast("set[Connection]", self.connections)
            stalled = [one for one in connections if one.is_stalled]
            stalled.sort(key=lambda one: one.since)
            # Several at a time, because looking for them takes long.
            for one in stalled[: 1 + len(stalled) // 8]:
                one.end()

    @property
    def is_stalled(self) -> bool:
        """Whether the next step is the client's, not the service's."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        return cycle.more_body or self.flow.write_paused

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        self._await_head()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        if self._deadline:
            self._deadline.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Ends the connection after the answer under way, if its request arrives."""
        super().shutdown()
        self.loop.call_later(_LAST_SECONDS, self._end_stalled)

    def end(self) -> None:
        """Closes the connection, whatever its client has not read yet."""
        self.connections.discard(self)  # `connection_lost` comes later.
        self.transport.abort()

    def _await_head(self) -> None:
        if self._deadline:
            self._deadline.cancel()
        self.since = time.monotonic()
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self._end_idle)

    def _end_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.end()

    def _end_stalled(self) -> None:
        if self.is_stalled:
            self.end()

    @staticmethod
    def _warn(count: int) -> None:
        if time.monotonic() >= Connection._next_line:
            Connection._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            say(
                f"{count} connections are too many; those end that wait longest for "
                "their clients."
            )
