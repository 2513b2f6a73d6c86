"""What waits to be sent to the agent: encoded messages, and uploads that are made piece by piece as they leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from allreduced.protocol.local import ToAgent, encode

GATHER = 64
"""Pieces of output that are handed out at a time."""


class Outbox:
    """The messages of one connection in their order, and the numbers of its requests."""

    def __init__(self) -> None:
        self._queue: deque[bytes | Iterator[bytes]] = deque()
        self._ready: deque[memoryview] = deque()
        self._last_request = 0

    def __bool__(self) -> bool:
        return bool(self._ready or self._queue)

    def next_request(self) -> int:
        """Return a number that no request of this connection had."""
        self._last_request += 1
        return self._last_request

    def send(self, message: ToAgent) -> None:
        """Queue a message."""
        self._queue.append(encode(message))

    def send_pieces(self, pieces: Iterator[bytes]) -> None:
        """Queue encoded messages that are made when they can leave."""
        self._queue.append(pieces)

    def pieces(self) -> list[memoryview]:
        """Return the next pieces to send; tell :meth:`sent` how much of them went out."""
        while self._queue and len(self._ready) < GATHER:
            head = self._queue[0]
            if isinstance(head, bytes):
                self._queue.popleft()
                self._ready.append(memoryview(head))
                continue
            if self._ready:
                break  # pieces of an upload are large: made one at a time, when they can leave
            piece = next(head, None)
            if piece is None:
                self._queue.popleft()
            else:
                self._ready.append(memoryview(piece))
        return list(self._ready)

    def sent(self, nbytes: int) -> None:
        """Forget the first ``nbytes`` of the pieces."""
        while nbytes:
            head = self._ready[0]
            if nbytes < len(head):
                self._ready[0] = head[nbytes:]
                return
            nbytes -= len(head)
            self._ready.popleft()

    def clear(self) -> None:
        """Forget everything: nobody takes it any more."""
        self._queue.clear()
        self._ready.clear()
