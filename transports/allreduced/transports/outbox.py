"""The sends that one end of a link still has to cut into frames, and their order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from allreduced.transports.postings import flat


class Outgoing:
    """One send. Its memory is read until ``in_flight`` is 0 and nothing of it is left to cut."""

    __slots__ = ("in_flight", "next", "offset", "priority", "send", "serial", "share", "tag", "view")

    def __init__(
        self, send: int, serial: int, offset: int, view: memoryview, tag: int, priority: int, share: int = 0
    ) -> None:
        self.send = send
        self.serial = serial
        self.offset = offset
        self.view = view
        self.tag = tag
        self.priority = priority
        self.share = share
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


class _Share:
    """The sends of one user that have bytes left to cut, by priority; no deque is empty.

    ``served``: bytes that were cut for it, counted from where the others stood when it had nothing to send.
    """

    __slots__ = ("served", "turns")

    def __init__(self) -> None:
        self.served = 0
        self.turns: dict[int, deque[Outgoing]] = {}

    def next(self) -> Outgoing:
        """Return the send whose turn it is, and take it out of the turns."""
        priority = max(self.turns)
        turns = self.turns[priority]
        outgoing = turns.popleft()
        if not turns:
            del self.turns[priority]
        return outgoing

    def add(self, outgoing: Outgoing) -> None:
        self.turns.setdefault(outgoing.priority, deque()).append(outgoing)

    def remove(self, outgoing: Outgoing) -> None:
        turns = self.turns[outgoing.priority]
        turns.remove(outgoing)
        if not turns:
            del self.turns[outgoing.priority]


class Outbox:
    """All sends of one end of a link, and whose turn it is.

    Shares that have something to send get the same number of bytes, whatever the priorities, the sizes and the number
    of their sends (Goyal, Vin, Cheng, "Start-time fair queueing", 1996). Within a share higher priority comes first;
    sends of one priority give frames in turns.
    """

    _KNOWN = 64
    """Shares after which those that have nothing to send, and nothing to make up for, are forgotten."""

    def __init__(self, max_frame: int) -> None:
        self._max_frame = max_frame
        self._sends: dict[int, Outgoing] = {}
        self._shares: dict[int, _Share] = {}
        self._active: dict[int, _Share] = {}
        """Those of them that have bytes left to cut."""
        self._reached = 0
        """What the share had been served that went last: one that begins to send begins there."""

    def __len__(self) -> int:
        return len(self._sends)

    @property
    def waiting(self) -> bool:
        """True where a frame can be taken."""
        return bool(self._active)

    def add(
        self, send: int, serial: int, offset: int, buffer: memoryview, tag: int, priority: int, share: int = 0
    ) -> bool:
        """Queue a send. Return False if it is empty: then it is over at once.

        :raises ValueError: the number is in use, or offset or tag do not fit into 64 bits.
        """
        if send in self._sends:
            raise ValueError(f"send {send} is under way already")
        if not 0 <= offset <= (1 << 64) - 1 - buffer.nbytes or not 0 <= tag < 1 << 64:
            raise ValueError(f"offset {offset} and tag {tag} of send {send} must fit into 64 bits")
        outgoing = Outgoing(send, serial, offset, flat(buffer), tag, priority, share)
        if not outgoing.view.nbytes:
            return False
        self._sends[send] = outgoing
        self._activate(share).add(outgoing)
        return True

    def find(self, send: int) -> Outgoing | None:
        """Return a send that is under way."""
        return self._sends.get(send)

    def take(self) -> OutgoingFrame | None:
        """Cut the next frame off, for a data flow that is free."""
        if not self._active:
            return None
        share = next(iter(self._active.values()))
        if len(self._active) > 1:
            share = min(self._active.values(), key=_served)
        outgoing = share.next()
        start = outgoing.next
        outgoing.next = end = min(start + self._max_frame, len(outgoing.view))
        outgoing.in_flight += 1
        self._reached = share.served
        share.served += end - start
        if end < len(outgoing.view):
            share.add(outgoing)
        elif not share.turns:
            self._deactivate(outgoing.share)
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
            share = self._active[outgoing.share]
            share.remove(outgoing)
            if not share.turns:
                self._deactivate(outgoing.share)
        return outgoing

    def clear(self) -> list[int]:
        """Stop all sends and return their numbers; nothing may read their memory any more."""
        numbers = list(self._sends)
        for outgoing in self._sends.values():
            outgoing.view.release()
        self._sends.clear()
        self._shares.clear()
        self._active.clear()
        return numbers

    def _activate(self, number: int) -> _Share:
        """Return a share that is about to have something to send."""
        share = self._active.get(number)
        if share is not None:
            return share
        share = self._shares.get(number)
        if share is None:
            if len(self._shares) >= self._KNOWN:
                self._forget()
            share = self._shares[number] = _Share()
        # What it did not use it cannot save up; what it had more than others meanwhile still counts.
        share.served = max(share.served, self._reached)
        self._active[number] = share
        return share

    def _deactivate(self, number: int) -> None:
        """Take note that a share has nothing to send. Where none has, nobody waits for anybody: all begin anew."""
        del self._active[number]
        if not self._active:
            self._shares.clear()
            self._reached = 0

    def _forget(self) -> None:
        for number, share in list(self._shares.items()):
            if number not in self._active and share.served <= self._reached:
                del self._shares[number]


def _served(share: _Share) -> int:
    return share.served
