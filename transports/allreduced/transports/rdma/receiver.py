"""The receiving half of a data flow: learns what was written into place, and copies what came in messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from allreduced.core.errors import ProtocolError
from allreduced.transports.base import MAX_FRAME, LinkStats
from allreduced.transports.postings import Posting, Postings
from allreduced.transports.rdma import wire
from allreduced.transports.rdma.endpoint import Endpoint
from allreduced.transports.rdma.verbs_port import Completion, CompletionKind, QueuePair


class ReceiverLink(Protocol):
    """The link, as the receivers of its flows see it."""

    @property
    def postings(self) -> Postings:
        """Where data may go."""

    @property
    def stats(self) -> LinkStats:
        """What is counted."""

    def landed(self, posting: Posting, offset: int, length: int, tag: int) -> None:
        """Take note of a frame that is complete in the memory of a posting."""

    def dropped(self, posting: Posting) -> None:
        """Take note that a frame in flight does not write into a cancelled posting any more."""

    def flow_ended(self) -> None:
        """Take note that the peer sends nothing more on a flow."""

    def is_alive(self) -> bool:
        """Tell whether the link did not end yet."""

    def send_carrier(self, payload: bytes) -> None:
        """Say something to the other end of this transport."""


@dataclass(slots=True)
class _Partial:
    """A frame that comes in several messages. ``posting`` is None where nobody wants it any more."""

    posting: Posting | None
    into: memoryview
    offset: int
    length: int
    tag: int
    got: int = 0


class FlowReceiver:
    """Takes the completions of one receive queue, in order, and posts its requests again."""

    def __init__(self, link: ReceiverLink, flow: int, pair: QueuePair, endpoint: Endpoint) -> None:
        self._link = link
        self._flow = flow
        self._pair = pair
        self._endpoint = endpoint
        self._announced: dict[int, wire.Announcement] = {}
        self._partial: _Partial | None = None
        self._ended = False
        self._used: list[int] = []
        """Slots whose requests were used up and not posted again yet."""
        self._owed = 0
        """Requests posted again that the peer was not told of yet."""

    def completed(self, completion: Completion) -> None:
        """Take one completion.

        :raises ProtocolError: the peer sent what it must not.
        """
        if self._ended:
            raise ProtocolError("data behind the end of a data flow")
        if completion.kind is CompletionKind.WRITTEN:
            self._used.append(completion.identifier)
            self._written(completion.immediate, completion.length)
            return
        view = self._endpoint.into.view(completion.identifier, completion.length)
        try:
            self._message(view)
        finally:
            view.release()
            self._used.append(completion.identifier)

    def post_again(self) -> None:
        """Post what was used up, and give the peer credits for it once that is worth a message.

        :raises VerbsError: the queue pair failed.
        """
        if not self._used:
            return
        endpoint = self._endpoint
        self._pair.post_receive([endpoint.receive_request(slot) for slot in self._used])
        self._owed += len(self._used)
        self._used.clear()
        if self._owed >= endpoint.depth // 4:
            self._link.send_carrier(wire.Credit(self._flow, self._owed).pack())
            self._owed = 0

    def redirect(self, posting: Posting) -> None:
        """Drop the rest of a frame that comes in messages where it was meant for this posting."""
        partial = self._partial
        if partial is not None and partial.posting is posting:
            partial.posting = None
            partial.into = memoryview(b"")
            self._link.dropped(posting)

    def stop(self) -> None:
        """Hold no memory of the owner any more."""
        self._partial = None

    def _written(self, immediate: int, length: int) -> None:
        announcement = self._announced.get(immediate >> wire.FRAME_BITS)
        if announcement is None:
            raise ProtocolError(f"an immediate that names no posted tile: {immediate:#010x}")
        if self._partial is not None:
            raise ProtocolError("a write in the middle of a frame that comes in messages")
        offset = announcement.offset_of(immediate, length)
        posting = self._link.postings.find(announcement.serial)
        if posting is None:
            self._link.stats.frames_unclaimed += 1
            return
        posting.claim(offset, length).release()
        self._link.landed(posting, offset, length, announcement.tag)

    def _message(self, view: memoryview) -> None:
        kind, length, serial, offset, tag = wire.read_header(view)
        if kind == wire.MORE:
            self._more(view[wire.HEADER :])
        elif self._partial is not None:
            raise ProtocolError("a message in the middle of a frame that comes in several")
        elif kind == wire.FRAME:
            self._begin(length, serial, offset, tag)
            self._more(view[wire.HEADER :])
        elif kind == wire.ANNOUNCE:
            announcement = wire.read_announcement(view)
            self._announced[announcement.number] = announcement
        elif kind == wire.SKIPPED:
            self._link.stats.frames_unclaimed += 1
        elif kind == wire.END:
            self._ended = True
            self._link.flow_ended()

    def _begin(self, length: int, serial: int, offset: int, tag: int) -> None:
        if not 0 < length <= MAX_FRAME:
            raise ProtocolError(f"a data frame of {length} bytes, {MAX_FRAME} are allowed")
        posting = self._link.postings.find(serial)
        into = memoryview(b"") if posting is None else posting.claim(offset, length)
        self._partial = _Partial(posting, into, offset, length, tag)

    def _more(self, piece: memoryview) -> None:
        partial = self._partial
        if partial is None or not piece or partial.got + len(piece) > partial.length:
            raise ProtocolError(f"{len(piece)} bytes that belong to no frame")
        begin, partial.got = partial.got, partial.got + len(piece)
        if partial.posting is not None:
            partial.into[begin : partial.got] = piece
            self._link.stats.bytes_copied += len(piece)
        if partial.got < partial.length:
            return
        self._partial = None
        partial.into.release()  # the owner may unmap the memory in the callback
        if partial.posting is None:
            self._link.stats.frames_unclaimed += 1
        else:
            self._link.landed(partial.posting, partial.offset, partial.length, partial.tag)
