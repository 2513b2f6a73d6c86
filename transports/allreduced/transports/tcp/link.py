"""What links with a TCP control flow share: their flows, and the orderly end between them. And the link over TCP."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Sequence
from typing import ClassVar, Final, Protocol

from allreduced.core.errors import ProtocolError
from allreduced.core.identity import PeerIdentity
from allreduced.transports.outbox import Outgoing, OutgoingFrame
from allreduced.transports.postings import Posting
from allreduced.transports.tcp import wire
from allreduced.transports.tcp.control import ControlFlow
from allreduced.transports.tcp.data import DataFlow
from allreduced.transports.tcp.owner import FlowOwner
from allreduced.transports.tcp.stream import Stream

CONTROL_QUEUE: Final = 64 << 20
"""Bytes of control frames that may wait for a peer that does not read."""


class Flow(Protocol):
    """One data flow, as its link uses it."""

    @property
    def end_sent(self) -> bool:
        """True once the end of this flow was given away."""

    def start(self) -> None:
        """Begin to read."""

    def wake(self) -> bool:
        """Take frames soon, if this flow is free. Return whether it was, so that no other need be woken."""

    def redirect(self, posting: Posting) -> None:
        """Drop the rest of a frame that was meant for this posting."""

    def detach(self, outgoing: Outgoing) -> None:
        """Send the rest of a frame from a private copy where it belongs to this send."""

    def stop(self, *, reset: bool) -> None:
        """End at once, and hold no memory any more."""


class FlowLink(FlowOwner):
    """An authenticated link with a TCP control flow, on the stream ``control``."""

    _last_kind: ClassVar[int] = wire.BYE
    """The highest kind of control frame that may come; ``wire.CARRIER`` where ``_carrier_frame`` is for something."""

    def __init__(
        self,
        peer: PeerIdentity,
        control: Stream,
        *,
        initiator: bool,
        local_address: str,
        remote_address: str,
        max_frame: int,
        version: int,
        control_queue: int = CONTROL_QUEUE,
    ) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            peer,
            initiator=initiator,
            local_address=local_address,
            remote_address=remote_address,
            max_frame=max_frame,
            version=version,
        )
        self._control = ControlFlow(self, control, control_queue, self._last_kind)
        self._data = self._make_flows()
        self._ends_missing = 1 + len(self._data)
        self._control_ended = False
        self._bye_sent = False
        self._bye_received = False
        self._reset = True

    @abc.abstractmethod
    def _make_flows(self) -> Sequence[Flow]:
        """Return the data flows, not started yet. Called once, from ``__init__``."""

    def _carrier_frame(self, payload: bytes) -> None:
        """Take what the other end of this transport says to this one."""
        self.violated(ProtocolError("a control frame of a transport that this link does not use"))

    def send_carrier(self, payload: bytes) -> None:
        """Say something to the other end of this transport, on the control flow."""
        if self.is_alive() and not self._bye_sent:  # behind the goodbye nobody needs it any more
            self._control.queue(wire.CARRIER, payload)

    # Told by the flows

    def control_frame(self, kind: int, payload: bytes) -> None:  # noqa: D102 - see FlowOwner
        if kind == wire.CARRIER:
            self._carrier_frame(payload)  # also behind the end: it serves the frames that are still on their way
        elif kind != wire.BYE and self._control_ended:
            self.violated(ProtocolError("control frames behind the end of the control flow"))
        elif kind == wire.PAYLOAD:
            self.stats.control_received += 1
            self.tell_now(self.events.control_received, payload)
        elif kind == wire.END:
            self._control_ended = True
            self.flow_ended()
        elif self._end_sent_everywhere():
            self._bye_received = True
            self.control_flushed()
        else:
            self.violated(ProtocolError("a goodbye before the end of the link"))

    def control_flushed(self) -> None:  # noqa: D102 - see FlowOwner
        # Both sides have everything then: the orderly end is over.
        if self._bye_received and self._bye_sent and self._control.flushed:
            self._reset = False
            self.end(None)

    def control_ended(self, reason: str) -> None:  # noqa: D102 - see FlowOwner
        if self._bye_received:
            # The peer has everything and has told us all it had; it need not wait for our goodbye.
            self._reset = False
            self.end(None)
        else:
            self.broken(reason)

    def flow_ended(self) -> None:  # noqa: D102 - see FlowOwner
        self._ends_missing -= 1
        self.begin_closing()
        if self._ends_missing == 0 and self.is_alive():
            self._bye_sent = True
            self._control.queue(wire.BYE, b"")

    def frame_sent(self, frame: OutgoingFrame) -> None:  # noqa: D102 - see FlowOwner
        self.stats.frames_sent += 1
        self.stats.bytes_sent += frame.length
        over = self.outbox.finished(frame)
        if over is not None:
            self.tell_now(self.events.sent, over)

    def frame_taken(self) -> None:  # noqa: D102 - see FlowOwner
        if self.outbox.waiting:
            self._wake()

    # Asked for by QueuedLink

    def _start(self) -> None:
        self._control.start()
        for flow in self._data:
            flow.start()

    def _queue_control(self, payload: bytes) -> None:
        self._control.queue(wire.PAYLOAD, payload)

    def _wake(self) -> None:
        # One: a second that finds nothing left costs as much as a small frame. It wakes the next where more is there.
        for flow in self._data:
            if flow.wake():
                break

    def _redirect(self, posting: Posting) -> None:
        for flow in self._data:
            flow.redirect(posting)

    def _detach(self, outgoing: Outgoing) -> None:
        for flow in self._data:
            flow.detach(outgoing)

    def _close_in_order(self) -> None:
        self._control.queue(wire.END, b"")
        for flow in self._data:
            flow.wake()

    def _tear_down(self) -> None:
        self._control.stop(reset=self._reset)
        for flow in self._data:
            flow.stop(reset=self._reset)

    def _end_sent_everywhere(self) -> bool:
        return self.is_closing() and all(flow.end_sent for flow in self._data)


class TcpLink(FlowLink):
    """A link over TCP. ``data``: the streams of its data flows."""

    def __init__(
        self,
        peer: PeerIdentity,
        control: Stream,
        data: Sequence[Stream],
        *,
        initiator: bool,
        local_address: str,
        remote_address: str,
        max_frame: int,
        version: int,
    ) -> None:
        self._streams = data
        super().__init__(
            peer,
            control,
            initiator=initiator,
            local_address=local_address,
            remote_address=remote_address,
            max_frame=max_frame,
            version=version,
        )

    def _make_flows(self) -> Sequence[Flow]:
        return [DataFlow(self, stream) for stream in self._streams]
