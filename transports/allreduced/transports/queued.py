"""What the links of all transports share: which sends and receives are under way, and who is told what, when."""

from __future__ import annotations

import abc
import asyncio
import enum
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Concatenate, ParamSpec

from allreduced.core.errors import AgentUnavailable, AllReducedError, InternalError, ProtocolError
from allreduced.core.identity import PeerIdentity
from allreduced.transports.base import MAX_CONTROL, Link, LinkEvents, LinkStats
from allreduced.transports.outbox import Outbox, Outgoing
from allreduced.transports.postings import Posting, Postings, serial_of, token_of

_log = logging.getLogger("allreduced.transports")

P = ParamSpec("P")


class _State(enum.Enum):
    OPEN = enum.auto()
    CLOSING = enum.auto()
    """An orderly end has begun, by either side: nothing new is sent, what is queued goes out, everything is read."""
    DEAD = enum.auto()


class QueuedLink(Link):
    """The bookkeeping of a link; a transport moves the bytes.

    Callbacks that a method causes are queued and called from the loop, in order. ``closed`` comes when the queue is
    empty after the end, so that it is the last one whatever is called in between.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        peer: PeerIdentity,
        *,
        initiator: bool,
        local_address: str,
        remote_address: str,
        max_frame: int,
        version: int,
    ) -> None:
        self.loop = loop
        self.peer = peer
        self.version = version
        self.initiator = initiator
        self.local_address = local_address
        self.remote_address = remote_address
        self.max_frame = max_frame
        self.stats = LinkStats()
        self.last_received = loop.time()
        self.postings = Postings()
        self.outbox = Outbox(max_frame)
        self._events: LinkEvents | None = None
        self._state = _State.OPEN
        self._error: AllReducedError | None = None
        self._queue: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self._quarantine: set[int] = set()
        """Cancelled receives that a frame in flight may still write to."""
        self._over: asyncio.Future[None] = loop.create_future()

    # For the transport

    def is_alive(self) -> bool:
        """Return true until the link ended, for whatever reason."""
        return self._state is not _State.DEAD

    def is_closing(self) -> bool:
        """Return true while an orderly end is under way."""
        return self._state is _State.CLOSING

    @property
    def events(self) -> LinkEvents:
        """Who is told."""
        if self._events is None:
            raise InternalError("a link was used before it was started")
        return self._events

    def start(self, events: LinkEvents) -> None:
        """Begin to read and to tell ``events``."""
        self._events = events
        if self.is_alive():
            self._start()
        else:
            self._schedule()

    def tell(self, callback: Callable[Concatenate[Link, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call ``callback(self, …)`` of the events later, from the loop."""
        self._queue.append(partial(callback, self, *args, **kwargs))
        self._schedule()

    def tell_now(self, callback: Callable[Concatenate[Link, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call ``callback(self, …)`` of the events; only from the loop, never from inside a method of the contract."""
        self._guarded(partial(callback, self, *args, **kwargs))

    def landed(self, posting: Posting, offset: int, length: int, tag: int) -> None:
        """Take note of a frame that is complete in the memory of a posting. Only from the loop."""
        self.stats.frames_received += 1
        self.stats.bytes_received += length
        self.postings.landed(posting, length)
        self.tell_now(self.events.received, posting.receive, offset, length, tag)

    def dropped(self, posting: Posting) -> None:
        """Take note that a frame in flight does not write into a cancelled posting any more."""
        posting.in_flight -= 1
        self._free_if_quiet(posting)

    def begin_closing(self) -> None:
        """Begin the orderly end, because this or the other side wants it."""
        if self._state is _State.OPEN:
            self._state = _State.CLOSING
            self._close_in_order()

    def end(self, error: AllReducedError | None) -> None:
        """End the link now; all of its memory is free when this returns."""
        if self._state is _State.DEAD:
            return
        self._state = _State.DEAD
        self._error = error
        self._tear_down()
        if self._events is not None:
            for receive in (*self._quarantine, *self.postings.clear()):
                self.tell(self._events.receive_cancelled, receive)
            for send in self.outbox.clear():
                self.tell(self._events.sent, send)
            self._schedule()
        self._quarantine.clear()

    def broken(self, reason: str) -> None:
        """End the link because the network or the peer failed."""
        self.end(AgentUnavailable(f"the link to node {self.peer.node!r} at {self.remote_address} is broken: {reason}"))

    def violated(self, error: ProtocolError) -> None:
        """End the link because the peer did what the protocol does not allow."""
        self.end(
            ProtocolError(f"node {self.peer.node!r} at {self.remote_address} sent {error.message}", hint=error.hint)
        )

    @abc.abstractmethod
    def _start(self) -> None:
        """Begin to read."""

    @abc.abstractmethod
    def _queue_control(self, payload: bytes) -> None:
        """Send one control frame of allowed length."""

    @abc.abstractmethod
    def _wake(self) -> None:
        """See to it that free data flows take frames from the outbox, later, from the loop."""

    @abc.abstractmethod
    def _redirect(self, posting: Posting) -> None:
        """Make frames in flight miss a cancelled posting, where that can be done at once (see ``dropped``)."""

    @abc.abstractmethod
    def _detach(self, outgoing: Outgoing) -> None:
        """Give frames in flight of a cancelled send private copies of their bytes."""

    @abc.abstractmethod
    def _close_in_order(self) -> None:
        """Send what is queued, then tell the other side that this was all; ``end(None)`` when both sides did."""

    @abc.abstractmethod
    def _tear_down(self) -> None:
        """Drop every connection at once; nothing may touch any memory afterwards."""

    # The contract

    def send_control(self, payload: bytes) -> None:  # noqa: D102 - see Link
        if len(payload) > MAX_CONTROL:
            raise ValueError(f"a control frame of {len(payload)} bytes, {MAX_CONTROL} are allowed")
        if self._state is _State.OPEN:
            self.stats.control_sent += 1
            self._queue_control(payload)

    def post_receive(self, receive: int, buffer: memoryview) -> bytes:  # noqa: D102 - see Link
        if not self.is_alive():
            return token_of(0)
        if receive in self._quarantine:
            raise ValueError(f"receive {receive} is being cancelled; its memory is not free yet")
        return token_of(self.postings.post(receive, buffer).serial)

    def cancel_receive(self, receive: int) -> None:  # noqa: D102 - see Link
        posting = self.postings.cancel(receive)
        if posting is None:
            return
        self._quarantine.add(receive)
        if posting.in_flight:
            self._redirect(posting)
        else:
            self._free_if_quiet(posting)

    def send(  # noqa: D102 - see Link
        self,
        send: int,
        token: bytes,
        offset: int,
        buffer: memoryview,
        *,
        tag: int = 0,
        priority: int = 0,
        share: int = 0,
    ) -> None:
        if self._state is not _State.OPEN:
            if not self._over.done() and self._events is not None:
                self.tell(self._events.sent, send)  # its owner may not know of the end yet and waits for this
            return
        try:
            serial = serial_of(token)
        except ProtocolError as error:
            self.tell(self.events.sent, send)
            self.violated(error)
            return
        if self.outbox.add(send, serial, offset, buffer, tag, priority, share):
            self._wake()
        else:
            self.tell(self.events.sent, send)

    def cancel_send(self, send: int) -> None:  # noqa: D102 - see Link
        outgoing = self.outbox.cancel(send)
        if outgoing is None:
            return
        if outgoing.in_flight:
            self._detach(outgoing)
        outgoing.view.release()
        self.tell(self.events.sent, send)

    def abort(self, error: AllReducedError) -> None:  # noqa: D102 - see Link
        self.end(error)

    async def close(self, timeout: float) -> None:  # noqa: D102 - see Link
        self.begin_closing()
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._over)
        except TimeoutError:
            self.broken(f"it did not take everything within the {timeout:g} s for closing")
            await asyncio.shield(self._over)
        except asyncio.CancelledError:
            self.broken("closing was cancelled")
            raise

    # Inside

    def _free_if_quiet(self, posting: Posting) -> None:
        if not posting.in_flight and posting.receive in self._quarantine:
            self._quarantine.discard(posting.receive)
            posting.view.release()
            self.tell(self.events.receive_cancelled, posting.receive)

    def _schedule(self) -> None:
        if not self._scheduled and self._events is not None:
            self._scheduled = True
            self.loop.call_soon(self._drain)

    def _drain(self) -> None:
        while self._queue:
            self._guarded(self._queue.popleft())
        self._scheduled = False
        if self._state is _State.DEAD and not self._over.done():
            self._over.set_result(None)
            self._guarded(partial(self.events.closed, self, self._error))

    def _guarded(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:
            _log.exception("event=link_owner_failed peer=%s address=%s", self.peer.node, self.remote_address)
            failure = InternalError(f"the owner of the link to node {self.peer.node!r} failed: {error!r}")
            failure.__cause__ = error
            self.end(failure)
