"""One data flow of an RDMA link: a queue pair with its sending and its receiving half."""

from __future__ import annotations

from typing import Protocol

from allreduced.transports.outbox import Outgoing
from allreduced.transports.postings import Posting
from allreduced.transports.rdma import wire
from allreduced.transports.rdma.endpoint import SEND_SLOTS, Endpoint
from allreduced.transports.rdma.receiver import FlowReceiver, ReceiverLink
from allreduced.transports.rdma.sender import FlowSender, SenderLink


class FlowOwner(SenderLink, ReceiverLink, Protocol):
    """The link, as its flows see it."""


class RdmaFlow:
    """Implements ``tcp.link.Flow`` on the queue pair of that index. ``credits`` and ``room``: what the peer takes."""

    def __init__(self, link: FlowOwner, index: int, endpoint: Endpoint, *, credit: int, room: int) -> None:
        self.pair = endpoint.pairs[index]
        slots = range(index * SEND_SLOTS, (index + 1) * SEND_SLOTS)
        self.sender = FlowSender(link, self.pair, endpoint.out, slots, room=min(room, endpoint.out.size - wire.HEADER))
        self.sender.credits = credit
        self.receiver = FlowReceiver(link, index, self.pair, endpoint)

    @property
    def end_sent(self) -> bool:
        """True once the end of this flow was posted."""
        return self.sender.end_sent

    def start(self) -> None:
        """Send what there is; what comes is brought by the link."""
        self.sender.wake()

    def wake(self) -> bool:
        """Take frames soon, if this flow is free; return whether it was."""
        return self.sender.wake()

    def redirect(self, posting: Posting) -> None:
        """Drop the rest of a frame that was meant for this posting."""
        self.receiver.redirect(posting)

    def detach(self, outgoing: Outgoing) -> None:
        """Send the rest of a frame that goes in messages from a private copy where it belongs to this send."""
        self.sender.detach(outgoing)

    def stop(self, *, reset: bool) -> None:
        """Hold no memory any more; the queue pair was closed before."""
        self.sender.stop()
        self.receiver.stop()
