"""A link over TCP: its flows, and the orderly end between them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Final

from allreduced.core.errors import ProtocolError
from allreduced.core.identity import PeerIdentity
from allreduced.transports.outbox import Outgoing, OutgoingFrame
from allreduced.transports.postings import Posting
from allreduced.transports.tcp import wire
from allreduced.transports.tcp.control import ControlFlow
from allreduced.transports.tcp.data import DataFlow
from allreduced.transports.tcp.owner import FlowOwner

CONTROL_QUEUE: Final = 64 << 20
"""Bytes of control frames that may wait for a peer that does not read."""


class TcpLink(FlowOwner):
    """An authenticated link; ``flows[0]`` is the control socket, each with the bytes that came behind its handshake."""

    def __init__(
        self,
        peer: PeerIdentity,
        flows: Sequence[tuple[socket.socket, bytes]],
        *,
        initiator: bool,
        local_address: str,
        remote_address: str,
        max_frame: int,
        control_queue: int = CONTROL_QUEUE,
    ) -> None:
        (control, early), *data = flows
        super().__init__(
            asyncio.get_running_loop(),
            peer,
            initiator=initiator,
            local_address=local_address,
            remote_address=remote_address,
            max_frame=max_frame,
        )
        self._control = ControlFlow(self, control, early, control_queue)
        self._data = [DataFlow(self, sock, rest) for sock, rest in data]
        self._ends_missing = len(flows)
        self._control_ended = False
        self._bye_sent = False
        self._bye_received = False
        self._reset = True

    # Told by the flows

    def control_frame(self, kind: int, payload: bytes) -> None:  # noqa: D102 - see FlowOwner
        if kind != wire.BYE and self._control_ended:
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
