"""The sends that one end of a link still has to cut into frames, and their order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from allreduced.transports.postings import flat


class Outgoing:
    """One send. Its memory is read until ``in_flight`` is 0 and nothing of it is left to cut."""

    __slots__ = ("in_flight", "next", "offset", "priority", "send", "serial", "tag", "view")

    def __init__(self, send: int, serial: int, offset: int, view: memoryview, tag: int, priority: int) -> None:
        self.send = send
        self.serial = serial
        self.offset = offset
        self.view = view
        self.tag = tag
        self.priority = priority
        self.next = 0
        self.in_flight = 0


@dataclass(slots=True)
class OutgoingFrame:
    """A frame that a data flow took. ``outgoing`` is None once its send was cancelled and ``payload`` is a copy."""

    outgoing: Outgoing | None
    serial: int
    offset: int
    tag: int
    length: int
    payload: memoryview


class Outbox:
    """All sends of one end of a link. Higher priority first; sends of one priority give frames in turns."""

    def __init__(self, max_frame: int) -> None:
        self._max_frame = max_frame
        self._sends: dict[int, Outgoing] = {}
        self._turns: dict[int, deque[Outgoing]] = {}
        """By priority, the sends that have bytes left to cut; no deque is empty."""

    def __len__(self) -> int:
        return len(self._sends)

    @property
    def waiting(self) -> bool:
        """True where a frame can be taken."""
        return bool(self._turns)

    def add(self, send: int, serial: int, offset: int, buffer: memoryview, tag: int, priority: int) -> bool:
        """Queue a send. Return False if it is empty: then it is over at once.

        :raises ValueError: the number is in use, or offset or tag do not fit into 64 bits.
        """
        if send in self._sends:
            raise ValueError(f"send {send} is under way already")
        if not 0 <= offset <= (1 << 64) - 1 - buffer.nbytes or not 0 <= tag < 1 << 64:
            raise ValueError(f"offset {offset} and tag {tag} of send {send} must fit into 64 bits")
        outgoing = Outgoing(send, serial, offset, flat(buffer), tag, priority)
        if not outgoing.view.nbytes:
            return False
        self._sends[send] = outgoing
        self._turns.setdefault(priority, deque()).append(outgoing)
        return True

    def take(self) -> OutgoingFrame | None:
        """Cut the next frame off, for a data flow that is free."""
        if not self._turns:
            return None
        priority = max(self._turns)
        turns = self._turns[priority]
        outgoing = turns.popleft()
        start = outgoing.next
        outgoing.next = end = min(start + self._max_frame, len(outgoing.view))
        outgoing.in_flight += 1
        if end < len(outgoing.view):
            turns.append(outgoing)
        elif not turns:
            del self._turns[priority]
        return OutgoingFrame(
            outgoing, outgoing.serial, outgoing.offset + start, outgoing.tag, end - start, outgoing.view[start:end]
        )

    def finished(self, frame: OutgoingFrame) -> int | None:
        """Take note that nothing reads a frame's memory any more. Return the number of a send that is over by that."""
        outgoing = frame.outgoing
        frame.payload.release()
        if outgoing is None:
            return None
        outgoing.in_flight -= 1
        if outgoing.in_flight or outgoing.next < len(outgoing.view):
            return None
        del self._sends[outgoing.send]
        outgoing.view.release()
        return outgoing.send

    def cancel(self, send: int) -> Outgoing | None:
        """Stop a send and return it, or None. The caller gives its frames in flight private copies."""
        outgoing = self._sends.pop(send, None)
        if outgoing is not None and outgoing.next < len(outgoing.view):
            turns = self._turns[outgoing.priority]
            turns.remove(outgoing)
            if not turns:
                del self._turns[outgoing.priority]
        return outgoing

    def clear(self) -> list[int]:
        """Stop all sends and return their numbers; nothing may read their memory any more."""
        numbers = list(self._sends)
        for outgoing in self._sends.values():
            outgoing.view.release()
        self._sends.clear()
        self._turns.clear()
        return numbers
