"""The sending half of a data flow: takes the next frame when it is free, and posts it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

from allreduced.transports.base import LinkStats
from allreduced.transports.outbox import Outbox, Outgoing, OutgoingFrame
from allreduced.transports.rdma import wire
from allreduced.transports.rdma.endpoint import SEND_DEPTH
from allreduced.transports.rdma.memory import Slots, address_of
from allreduced.transports.rdma.verbs_port import QueuePair, SendKind, SendRequest, VerbsError

WINDOW: Final = 2 << 20
"""Bytes written and not acknowledged, per flow, beyond which a third frame waits: an urgent one is soon next."""
_BATCH: Final = 16
"""Requests posted as one chain."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a frame goes. ``local_key`` and ``remote_key`` are set where it is written straight into place."""

    skip: bool = False
    local_key: int = 0
    remote_key: int = 0
    remote_address: int = 0
    """Where the frame belongs in the peer's memory."""
    send: int = 0
    end: int = 0
    """Offset in the receive at which its send ends."""


class SenderLink(Protocol):
    """The link, as the senders of its flows see it."""

    @property
    def outbox(self) -> Outbox:
        """Where frames are taken from."""

    @property
    def stats(self) -> LinkStats:
        """What is counted."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that everything runs on."""

    @property
    def max_frame(self) -> int:
        """Bytes of a frame at most."""

    def is_closing(self) -> bool:
        """Tell whether an orderly end is under way."""

    def way_of(self, frame: OutgoingFrame) -> Way:
        """Decide how a frame goes; one that is written is counted as under way from now on."""

    def frame_taken(self) -> None:
        """Take note that a flow took a frame, so that another one may take the next."""

    def frame_sent(self, frame: OutgoingFrame) -> None:
        """Take note that the memory of a frame is not read any more."""

    def write_done(self, serial: int) -> None:
        """Take note that a frame that was written is in place."""

    def broken(self, reason: str) -> None:
        """End the link."""


@dataclass(slots=True)
class _Posted:
    """What completes with one request: the slots and frames of it and of those before it without a completion."""

    identifier: int
    slot: int = -1
    frame: OutgoingFrame | None = None
    """A frame that is written, with its memory."""


class FlowSender:
    """Posts the frames of one queue pair. ``credits``: receive requests that the peer has posted for it."""

    def __init__(self, link: SenderLink, pair: QueuePair, slots: Slots, own_slots: range, *, room: int) -> None:
        self._link = link
        self._pair = pair
        self._slots = slots
        self._free = deque(own_slots)
        self._room = room
        """Payload bytes that fit into one message."""
        self.credits = 0
        self._identifier = 0
        self._posted: deque[_Posted] = deque()
        self._batch: list[SendRequest] = []
        self._inline_slots: list[int] = []
        self._writing = 0
        self._bytes_writing = 0
        self._fragments: OutgoingFrame | None = None
        """A frame whose beginning was sent in a message; the rest follows before anything else."""
        self._rest = memoryview(b"")
        self._announced: dict[int, wire.Announcement] = {}
        """By send, what was announced for it on this flow."""
        self._numbers: dict[int, int] = {}
        """By number of the announcement, the send that it was used for last."""
        self._number = 0
        self._scheduled = False
        self._open = True
        self.end_sent = False

    def wake(self) -> bool:
        """Take frames soon, if there is room for any; return whether that was not so already."""
        if not self._open or self._scheduled or not self._may_post():
            return False
        self._scheduled = True
        self._link.loop.call_soon(self._run)
        return True

    def forget(self, send: int) -> None:
        """Announce the send of that number anew; it is over."""
        self._announced.pop(send, None)

    def detach(self, outgoing: Outgoing) -> None:
        """Send the rest of a frame in messages from a private copy where it belongs to this send."""
        frame = self._fragments
        if frame is not None and frame.outgoing is outgoing:
            self._rest = memoryview(bytes(self._rest))
            frame.outgoing = None
            frame.payload.release()
            outgoing.in_flight -= 1

    def completed(self, identifier: int) -> None:
        """Take note that the request of that number and all before it are done."""
        while self._posted and self._posted[0].identifier <= identifier:
            posted = self._posted.popleft()
            if posted.slot >= 0:
                self._free.append(posted.slot)
            frame = posted.frame
            if frame is not None:
                self._writing -= 1
                self._bytes_writing -= frame.length
                self._link.frame_sent(frame)
                self._link.write_done(frame.serial)
        self.wake()

    def stop(self) -> None:
        """Post nothing any more and hold no memory of the owner."""
        self._open = False
        for posted in self._posted:
            if posted.frame is not None:
                posted.frame.payload.release()
        self._posted.clear()
        if self._fragments is not None:
            self._fragments.payload.release()
        self._fragments = None
        self._rest = memoryview(b"")

    def _run(self) -> None:
        self._scheduled = False
        if not self._open:
            return
        while len(self._batch) < _BATCH and self._may_post():
            if self._fragments is not None:
                self._more()
            elif self.end_sent or not self._next():
                break
        if not self._batch:
            return
        self._batch[-1].signalled = True
        full = len(self._batch) >= _BATCH
        try:
            self._pair.post_send(self._batch)
        except VerbsError as error:
            self._link.broken(str(error))
            return
        finally:
            self._batch.clear()
            self._free.extend(self._inline_slots)
            self._inline_slots.clear()
        if full:
            self.wake()

    def _may_post(self) -> bool:
        """Tell whether there is room for whatever the next frame needs: an announcement and a write."""
        return (
            self.credits >= 2
            and len(self._posted) + 2 <= SEND_DEPTH
            and bool(self._free)
            and (self._fragments is not None or self._writing < 2 or self._bytes_writing < WINDOW)
        )

    def _next(self) -> bool:
        """Put the next frame, or the end, into the batch. Return false where there is nothing."""
        link = self._link
        frame = link.outbox.take()
        if frame is None:
            if not link.is_closing():
                return False
            self.end_sent = True
            self._message(wire.header(wire.END))
            return True
        link.frame_taken()
        way = link.way_of(frame)
        if way.skip:
            self._message(wire.header(wire.SKIPPED, frame.length, frame.serial, frame.offset, frame.tag))
            link.frame_sent(frame)
        elif way.remote_key:
            self._write(frame, way)
        else:
            self._fragments = frame
            self._rest = frame.payload[:]
            first = wire.header(wire.FRAME, frame.length, frame.serial, frame.offset, frame.tag)
            self._fragment(first)
        return True

    def _more(self) -> None:
        self._fragment(wire.header(wire.MORE))

    def _fragment(self, header: bytes) -> None:
        """Send the next piece of the frame that goes in messages; its memory is free with the last one."""
        piece, self._rest = self._rest[: self._room], self._rest[self._room :]
        self._link.stats.bytes_copied += len(piece)
        self._message(header, piece)
        piece.release()
        frame = self._fragments
        if not self._rest and frame is not None:
            self._rest = memoryview(b"")
            self._fragments = None
            self._link.frame_sent(frame)

    def _message(self, header: bytes, payload: memoryview | None = None, *, solicited: bool = True) -> None:
        """Add a SEND to the batch."""
        length = len(header) + (len(payload) if payload is not None else 0)
        slot = self._free.popleft()
        view = self._slots.view(slot, length)
        view[: len(header)] = header
        if payload is not None:
            view[len(header) :] = payload
        view.release()
        inline = length <= self._pair.max_inline
        if inline:
            self._inline_slots.append(slot)
        self._add(
            SendRequest(
                0,
                SendKind.SEND,
                self._slots.address(slot),
                length,
                self._slots.key,
                signalled=False,
                solicited=solicited,
                inline=inline,
            ),
            _Posted(0, -1 if inline else slot),
        )

    def _write(self, frame: OutgoingFrame, way: Way) -> None:
        """Add an RDMA WRITE to the batch, behind the announcement that explains its immediate."""
        announcement = self._announced.get(way.send)
        if (
            announcement is None
            or announcement.serial != frame.serial
            or not announcement.covers(frame.offset, frame.length)
        ):
            announcement = self._announce(frame, way)
        self._writing += 1
        self._bytes_writing += frame.length
        self._add(
            SendRequest(
                0,
                SendKind.WRITE_WITH_IMMEDIATE,
                address_of(frame.payload),
                frame.length,
                way.local_key,
                remote_address=way.remote_address,
                remote_key=way.remote_key,
                immediate=announcement.immediate(frame.offset),
            ),
            _Posted(0, frame=frame),
        )

    def _announce(self, frame: OutgoingFrame, way: Way) -> wire.Announcement:
        number = self._number
        self._number = (number + 1) % wire.ANNOUNCEMENTS
        replaced = self._numbers.get(number)
        old = None if replaced is None else self._announced.get(replaced)
        if replaced is not None and old is not None and old.number == number:
            del self._announced[replaced]
        total = way.end - frame.offset
        announcement = wire.Announcement(
            number, frame.serial, frame.offset, total, min(self._link.max_frame, total), frame.tag
        )
        self._announced[way.send] = announcement
        self._numbers[number] = way.send
        self._message(announcement.pack(), solicited=False)  # the write behind it wakes the peer
        return announcement

    def _add(self, request: SendRequest, posted: _Posted) -> None:
        self._identifier += 1
        request.identifier = posted.identifier = self._identifier
        self.credits -= 1
        self._batch.append(request)
        self._posted.append(posted)
