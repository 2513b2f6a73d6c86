"""A TCP link, as its flows see it."""

from __future__ import annotations

import abc

from allreduced.transports.outbox import OutgoingFrame
from allreduced.transports.queued import QueuedLink


class FlowOwner(QueuedLink):
    """The link that flows belong to. Told by the flows, from the loop."""

    @abc.abstractmethod
    def control_frame(self, kind: int, payload: bytes) -> None:
        """Take one frame of the control flow."""

    @abc.abstractmethod
    def control_flushed(self) -> None:
        """Take note that everything queued on the control flow was given to the kernel."""

    @abc.abstractmethod
    def control_ended(self, reason: str) -> None:
        """Take note that the control socket ended or failed."""

    @abc.abstractmethod
    def flow_ended(self) -> None:
        """Take note that the peer sends nothing more on one of the flows."""

    @abc.abstractmethod
    def frame_sent(self, frame: OutgoingFrame) -> None:
        """Take note that a data frame was given to the kernel."""

    @abc.abstractmethod
    def frame_taken(self) -> None:
        """Take note that a data flow took a frame out of the outbox: there may be more for another one."""
