"""HTTP that does not wait for ever for a client."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# From the first byte of a request, or from the connection, to the end of its headers;
# for the rest of a body that nobody reads, since its answer is complete; and until a
# client that does not read its answers goes on reading.
PATIENCE_SECONDS = 10.0


class ImpatientProtocol(H11Protocol):
    """Closes a connection whose client does not do its part.

    uvicorn (0.54) waits without an end for the headers of a request, for the rest of a
    body whose answer was complete without it, and for a client to read its answers; so
    a few hundred such clients would take all connections. A body that is needed for the
    answer is the service's to time.
    """

    _given_up: asyncio.TimerHandle | None = None
    _not_read: asyncio.TimerHandle | None = None

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
        self._end_waiting_for_reader()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Begins to wait for a client that does not read."""
        super().pause_writing()
        # What is to be written would keep a mere `close` waiting.
        self._not_read = self.loop.call_later(PATIENCE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Ends that waiting."""
        self._end_waiting_for_reader()
        super().resume_writing()

    def _wait(self) -> None:
        if self._given_up is None:
            self._given_up = self.loop.call_later(
                PATIENCE_SECONDS, self.timeout_keep_alive_handler
            )

    def _end_waiting_for_reader(self) -> None:
        if self._not_read is not None:
            self._not_read.cancel()
            self._not_read = None

    def _end_waiting(self) -> None:
        if self._given_up is not None:
            self._given_up.cancel()
            self._given_up = None
