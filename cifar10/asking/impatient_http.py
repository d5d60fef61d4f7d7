"""HTTP that does not wait for ever for a request to begin."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# From the first byte of a request, or from the connection, to the end of its headers;
# and for the rest of a body that nobody reads, since its answer is complete.
HEADER_SECONDS = 10.0


class ImpatientProtocol(H11Protocol):
    """Closes a connection whose client does not finish the headers of its request.

    uvicorn (0.54) waits for them without an end, so that a few hundred silent clients
    would take all connections. It does the same for the rest of a body whose answer
    was complete without it. What else comes after the headers is the service's to time.
    """

    _given_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Goes on waiting, or ends it where a request's headers are complete."""
        super().data_received(data)  # That ends uvicorn's own waiting.
        between = self.conn.their_state is h11.IDLE
        unread = (self.conn.our_state, self.conn.their_state) == (
            h11.DONE,
            h11.SEND_BODY,
        )
        if between or unread:
            self._wait()
        else:
            self._end_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the waiting."""
        self._end_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._given_up is None:
            self._given_up = self.loop.call_later(
                HEADER_SECONDS, self.timeout_keep_alive_handler
            )

    def _end_waiting(self) -> None:
        if self._given_up is not None:
            self._given_up.cancel()
            self._given_up = None
