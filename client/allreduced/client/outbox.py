"""What waits to be sent to the agent: encoded messages, and uploads that are made piece by piece as they leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from allreduced.protocol.local import ToAgent, encode

GATHER = 64
"""Pieces of output that are handed out at a time."""

_BYTES = (bytes, memoryview)


class Outbox:
    """The messages of one connection in their order, and the numbers of its requests."""

    def __init__(self) -> None:
        self.queue: deque[bytes | memoryview | Iterator[bytes]] = deque()
        """What waits; only to be looked at from outside."""
        self._last_request = 0

    def next_request(self) -> int:
        """Return a number that no request of this connection had."""
        self._last_request += 1
        return self._last_request

    def send(self, message: ToAgent) -> None:
        """Queue a message."""
        self.queue.append(encode(message))

    def send_encoded(self, message: bytes) -> None:
        """Queue a message that is encoded already."""
        self.queue.append(message)

    def send_pieces(self, pieces: Iterator[bytes]) -> None:
        """Queue encoded messages that are made when they can leave."""
        self.queue.append(pieces)

    def pieces(self) -> list[bytes | memoryview]:
        """Return the next pieces to send; tell :meth:`sent` how much of them went out."""
        queue = self.queue
        while queue and not isinstance(queue[0], _BYTES):
            # Pieces of an upload are large: made one at a time, when they can leave.
            made = next(queue[0], None)
            if made is None:
                queue.popleft()
            else:
                queue.appendleft(made)
        ready: list[bytes | memoryview] = []
        for piece in islice(queue, GATHER):
            if not isinstance(piece, _BYTES):
                break
            ready.append(piece)
        return ready

    def sent(self, nbytes: int) -> None:
        """Forget the first ``nbytes`` of the pieces."""
        queue = self.queue
        while nbytes:
            head = queue.popleft()
            if isinstance(head, _BYTES):
                if nbytes < len(head):
                    queue.appendleft(memoryview(head)[nbytes:])
                    return
                nbytes -= len(head)

    def clear(self) -> None:
        """Forget everything: nobody takes it any more."""
        self.queue.clear()
