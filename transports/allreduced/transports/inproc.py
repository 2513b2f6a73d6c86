"""Links inside one process: the reference of the contract, and what tests of everything above use.

Both ends share an event loop. Each frame takes one turn of the loop from the sender's memory to the receiver's, so
that everything that can happen to a frame in flight can happen here too. Addresses are ``inproc://NAME``; a name that
ends in ``:0`` gets a free number.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from typing import ClassVar

from allreduced.core.errors import AgentUnavailable, AllReducedError, ConfigError, ProtocolError
from allreduced.core.identity import PeerIdentity
from allreduced.core.refusals import Kind, Plane, kind_of, refused
from allreduced.transports.base import (
    Authenticator,
    Handshake,
    Link,
    LinkAccepted,
    LinkEvents,
    LinkOptions,
    Listener,
    Transport,
)
from allreduced.transports.outbox import Outgoing, OutgoingFrame
from allreduced.transports.postings import Posting
from allreduced.transports.queued import QueuedLink

_log = logging.getLogger("allreduced.transports.inproc")

_PREFIX = "inproc://"
_listeners: dict[str, InprocListener] = {}
_numbers = itertools.count(1)


class _Flow:
    """One data flow in one direction: holds at most one frame in flight."""

    def __init__(self, link: InprocLink) -> None:
        self._link = link
        self._frame: OutgoingFrame | None = None
        self._posting: Posting | None = None
        self._into: memoryview | None = None

    @property
    def idle(self) -> bool:
        return self._frame is None

    def depart(self) -> None:
        """Take a frame, if there is one, and look up where it goes."""
        frame = self._link.outbox.take()
        if frame is None:
            return
        self._frame = frame
        other = self._link.other
        posting = other.postings.find(frame.serial)
        if posting is not None:
            try:
                self._into = posting.claim(frame.offset, frame.length)
            except ProtocolError as error:
                other.violated(error)
                return
            self._posting = posting
        self._link.loop.call_soon(self._arrive, frame)

    def detach(self, outgoing: Outgoing) -> None:
        """Read the rest of a cancelled send from a private copy."""
        if self._frame is not None and self._frame.outgoing is outgoing:
            self._frame.payload = memoryview(bytes(self._frame.payload))
            self._frame.outgoing = None

    def clear(self) -> None:
        """Drop the frame in flight; neither end's memory is touched or held any more."""
        if self._frame is not None:
            self._frame.payload.release()
        self._frame = self._posting = self._into = None

    def _arrive(self, frame: OutgoingFrame) -> None:
        if self._frame is not frame:
            return  # the link ended
        link, other = self._link, self._link.other
        posting, into = self._posting, self._into
        self._posting = self._into = None
        length = frame.length
        if posting is None or into is None or posting.cancelled:
            landed = None
        else:
            into[:] = frame.payload
            landed = posting
        del into
        self._frame = None
        link.stats.frames_sent += 1
        link.stats.bytes_sent += length
        over = link.outbox.finished(frame)
        if over is not None:
            link.tell(link.events.sent, over)
        other.last_received = other.loop.time()
        if landed is not None:
            other.landed(landed, frame.offset, length, frame.tag)
        else:
            other.stats.frames_unclaimed += 1
            if posting is not None:
                other.dropped(posting)
        link.move()


class InprocLink(QueuedLink):
    """One end of a link inside the process."""

    other: InprocLink

    def __init__(
        self,
        peer: PeerIdentity,
        *,
        initiator: bool,
        local_address: str,
        remote_address: str,
        options: LinkOptions,
        flows: int,
        version: int,
    ) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            peer,
            initiator=initiator,
            local_address=local_address,
            remote_address=remote_address,
            max_frame=options.max_frame,
            version=version,
        )
        self._flows = [_Flow(self) for _ in range(flows)]
        self._control: deque[bytes] = deque()
        self._started = False
        self._moving = False
        self._drained = False
        """This end, closing, has sent everything."""

    def move(self) -> None:
        """Let free flows take frames; once everything is out, take part in the orderly end."""
        self._moving = False
        if not self.is_alive() or not self._started or not self.other._started:
            return
        while self._control and self._both_alive():
            payload = self._control.popleft()
            other = self.other
            other.stats.control_received += 1
            other.last_received = other.loop.time()
            other.tell_now(other.events.control_received, payload)
        for flow in self._flows:
            if self._both_alive() and flow.idle and self.outbox.waiting:
                flow.depart()
        if (
            self._both_alive()
            and self.is_closing()
            and not self._drained
            and not len(self.outbox)
            and all(flow.idle for flow in self._flows)
        ):
            self._drained = True
            other = self.other
            other.begin_closing()
            if other._drained:
                self.end(None)
                other.end(None)

    def _both_alive(self) -> bool:
        return self.is_alive() and self.other.is_alive()

    def _start(self) -> None:
        self._started = True
        self._wake()
        self.other._wake()

    def _queue_control(self, payload: bytes) -> None:
        self._control.append(payload)
        self._wake()

    def _wake(self) -> None:
        if not self._moving:
            self._moving = True
            self.loop.call_soon(self.move)

    def _redirect(self, posting: Posting) -> None:
        """Do nothing: a frame in flight takes one more turn, and the memory stays in quarantine so long."""

    def _detach(self, outgoing: Outgoing) -> None:
        for flow in self._flows:
            flow.detach(outgoing)

    def _close_in_order(self) -> None:
        self._wake()

    def _tear_down(self) -> None:
        for flow in (*self._flows, *self.other._flows):
            flow.clear()
        self._control.clear()
        if self.other.is_alive():
            self.loop.call_soon(self.other.broken, "the other side ended it")


class InprocListener(Listener):
    """A name that can be dialled."""

    def __init__(self, address: str, accepted: LinkAccepted, options: LinkOptions) -> None:
        self.address = address
        self.accepted = accepted
        self.options = options
        self.mute = False
        """Set by tests: there is somebody who answers nothing, as a process that is stopped."""

    async def close(self) -> None:
        """Give the name back."""
        if _listeners.get(self.address) is self:
            del _listeners[self.address]


class InprocTransport(Transport):
    """``inproc://NAME``."""

    scheme: ClassVar[str] = "inproc"

    async def listen(self, address: str, accepted: LinkAccepted, options: LinkOptions) -> Listener:  # noqa: D102
        _check(address)
        if address.endswith(":0"):
            address = f"{address[:-1]}{next(_numbers)}"
        if address in _listeners:
            raise ConfigError(f"the address {address} is in use")
        listener = _listeners[address] = InprocListener(address, accepted, options)
        return listener

    async def connect(self, address: str, events: LinkEvents, options: LinkOptions) -> Link:  # noqa: D102
        _check(address)
        await asyncio.sleep(0)  # as any network: never over within the call
        listener = _listeners.get(address)
        if listener is None:
            raise AgentUnavailable(f"nobody listens at {address}") from ConnectionRefusedError(address)
        if listener.mute:
            await asyncio.sleep(options.handshake_timeout)
            raise AgentUnavailable(f"no agent at {address}: no answer in time") from TimeoutError(address)
        control, answered = _authenticate(options.authenticator, listener.options.authenticator, options.flows)
        here = f"{_PREFIX}dialler:{next(_numbers)}"
        link = InprocLink(
            control.peer,
            initiator=True,
            local_address=here,
            remote_address=address,
            options=options,
            flows=control.flows,
            version=control.version,
        )
        far = InprocLink(
            answered.peer,
            initiator=False,
            local_address=address,
            remote_address=here,
            options=listener.options,
            flows=control.flows,
            version=answered.version,
        )
        link.other, far.other = far, link
        link.start(events)
        try:
            far.start(listener.accepted(far))
        except Exception as error:  # whatever it raises refuses the link
            refused(Plane.PEERS, kind_of(error, Kind.NAME))
            _log.warning("event=link_refused peer=%s error=%s", far.peer.node, error)
            far.broken("it was refused here")
        return link


def _check(address: str) -> None:
    if not address.startswith(_PREFIX) or len(address) == len(_PREFIX):
        raise ConfigError(f"the address {address!r} is not of the form {_PREFIX}NAME")


def _authenticate(dialler: Authenticator, listener: Authenticator, flows: int) -> tuple[Handshake, Handshake]:
    """Run the handshakes of all flows of a link against each other; return those of the control flow."""
    control, answered = dialler.dial(b"", 0, flows), listener.answer()
    _join(control, answered)
    for flow in range(1, flows + 1):
        _join(dialler.dial(control.session, flow, flows), listener.answer())
    return control, answered


def _join(dialler: Handshake, listener: Handshake) -> None:
    data = dialler.start()
    while data:
        try:
            answer = listener.receive(data)
        except AllReducedError:
            if listener.refusal:
                dialler.receive(listener.refusal)
            raise
        data = dialler.receive(answer)


TRANSPORT = InprocTransport
