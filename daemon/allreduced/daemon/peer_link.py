"""One link to a peer agent, from the moment it is authenticated to its last callback."""

from __future__ import annotations

import abc
import asyncio
import enum
import logging
from dataclasses import dataclass
from typing import Protocol

from allreduced.core.errors import AllReducedError, ProtocolError
from allreduced.daemon.engine import events as engine_events
from allreduced.daemon.membership import events as membership_events
from allreduced.daemon.ports import EventSink
from allreduced.protocol.change import Accept, Accepted, Committed, Prepare, Promise, Trouble
from allreduced.protocol.peer import (
    Announce,
    Broken,
    Confirm,
    Form,
    Frame,
    Goodbye,
    Heartbeat,
    Left,
    Load,
    Loaded,
    LoadFrame,
    MoreGrants,
    PeerTable,
    Ready,
    Refuse,
    Retract,
    Status,
    StatusFrame,
    StatusRequest,
    decode,
    encode,
    is_known,
)
from allreduced.transports.base import Link, LinkEvents

logger = logging.getLogger("allreduced.peers")

MAX_HELD = 256
"""Frames that a candidate may wait with (a count)."""


class LinkSink(EventSink, Protocol):
    """Who gets what happens to the memory of links, besides events: the driver."""

    def received(self, link: Link, receive: int, offset: int, nbytes: int, tag: int) -> None:
        """Take note that bytes landed in a posted receive."""

    def receive_cancelled(self, link: Link, receive: int) -> None:
        """Take back the memory of a cancelled receive."""

    def sent(self, link: Link, send: int) -> None:
        """Take back the memory of a send."""

    def closed(self, link: Link) -> None:
        """Take back everything that the link still has: it is over."""


class LinkState(enum.Enum):
    """Where a link is in its life; it only moves down this list."""

    NEW = "new"
    CANDIDATE = "candidate"
    """Authenticated; the agent with the lower name has not chosen it (yet)."""
    CHOSEN = "chosen"
    """The one link of this pair: frames and data go over it."""
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to dial. ``node`` is empty where only the address is known.

    ``heard``: known from other agents only, forgotten when it says goodbye. ``patience``: seconds before the first try.
    """

    address: str
    node: str = ""
    heard: bool = False
    patience: float = 0.0


class LinkOwner(abc.ABC):
    """The peer plane, as its links see it."""

    sink: LinkSink

    @abc.abstractmethod
    def introduce(self, link: PeerLink) -> None:
        """Decide about a link that is authenticated. Called once per link, and not for one that is over already."""

    @abc.abstractmethod
    def first_frame(self, link: PeerLink) -> None:
        """Follow the other agent, which uses a candidate and so chose it; or leave it a candidate for now."""

    @abc.abstractmethod
    def turned_away(self, link: PeerLink, reason: str) -> None:
        """Take note that the other agent does not want a candidate, and why."""

    @abc.abstractmethod
    def said_goodbye(self, link: PeerLink, reason: str) -> None:
        """Take note that the peer leaves; the link that is used ends soon."""

    @abc.abstractmethod
    def table_received(self, link: PeerLink, table: PeerTable) -> None:
        """Take what the peer says about whom it knows."""

    @abc.abstractmethod
    def status_received(self, link: PeerLink, frame: StatusFrame) -> None:
        """Take a question about what runs here, or the answer to one."""

    @abc.abstractmethod
    def load_received(self, link: PeerLink, frame: LoadFrame) -> None:
        """Take a frame that measures the link, or the answer to one."""

    @abc.abstractmethod
    def ended(self, link: PeerLink, error: AllReducedError | None) -> None:
        """Take note that a link is over."""


class PeerLink(LinkEvents):
    """Takes a link's callbacks: decodes frames and hands everything on."""

    def __init__(self, owner: LinkOwner, target: Target | None = None) -> None:
        self._owner = owner
        self.target = target
        """What was dialled; None for a link that came in."""
        self.refused: AllReducedError | None = None
        """Why this agent does not want the link, if it does not."""
        self._sink = owner.sink
        self._link: Link | None = None
        self.state = LinkState.NEW
        self.goodbye = False
        self.address = ""
        """Where others can dial the peer; empty until it said so."""
        self.contested = False
        """There is a link in use already, and it is not clear yet which of the two the peer means."""
        self.opened_at = 0.0
        self.last_sent = 0.0
        self._held: list[bytes] = []
        """Frames that came before it was clear whether this link is used."""
        self.settled = asyncio.Event()
        """Set once the link is chosen or over."""
        self.over = asyncio.Event()

    @property
    def link(self) -> Link:
        """The transport's link; only after :meth:`open`."""
        if self._link is None:
            raise RuntimeError("the link is not open yet")
        return self._link

    @property
    def node(self) -> str:
        """The peer's name."""
        return self.link.peer.node

    @property
    def incarnation(self) -> int:
        """The peer's start."""
        return self.link.peer.incarnation

    def open(self, link: Link) -> None:
        """Take note of the authenticated link; further calls do nothing."""
        if self._link is not None:
            return
        self._link = link
        self.state = LinkState.CANDIDATE
        self.opened_at = self.last_sent = self._sink.now()
        self._owner.introduce(self)

    def send(self, frame: Frame) -> None:
        """Send a control frame; dropped where the link is over, and where the peer's version does not have it yet."""
        if self.state is not LinkState.OVER:
            if not is_known(frame, self.link.version):
                logger.debug("event=frame_withheld peer=%s frame=%s", self.node, type(frame).__name__)
                return
            self.last_sent = self._sink.now()
            self.link.send_control(encode(frame))

    @property
    def used_by_peer(self) -> bool:
        """True for a candidate on which frames wait: the peer has chosen it."""
        return bool(self._held)

    def replay(self) -> None:
        """Take the frames that came before this link was chosen."""
        held, self._held = self._held, []
        for payload in held:
            if self.state is LinkState.CHOSEN:
                self._take(payload)

    # LinkEvents

    def control_received(self, link: Link, payload: bytes) -> None:  # noqa: D102 - see LinkEvents
        self.open(link)
        if self.state is LinkState.OVER:
            return
        if self.state is LinkState.CANDIDATE and not self._wanted(payload):
            return
        self._take(payload)

    def _wanted(self, payload: bytes) -> bool:
        """Tell whether the frame of a candidate is to be taken now; else it waits, or the link is not used."""
        frame = self._decode(payload)
        if frame is None:
            return False
        if isinstance(frame, Goodbye):
            self._owner.turned_away(self, frame.reason)
            return False
        self._owner.first_frame(self)
        if self.state is LinkState.CHOSEN:
            return True
        if self.state is LinkState.CANDIDATE:
            if len(self._held) >= MAX_HELD:
                self.link.abort(ProtocolError("too many frames on a link that is not used yet"))
            else:
                self._held.append(payload)
        return False

    def _decode(self, payload: bytes) -> Frame | None:
        """Return the frame; None after it ended the link, for it is none."""
        try:
            return decode(payload)
        except ProtocolError as error:
            logger.warning("event=bad_frame peer=%s error=%r", self.node, error.message)
            self.link.abort(error)
            return None

    def _take(self, payload: bytes) -> None:
        frame = self._decode(payload)
        match frame:
            case Ready() | MoreGrants() | Confirm():  # first: each operation has some, and cases are tried in turn
                self._sink.engine_event(engine_events.FrameArrived(self.node, frame))
            case None | Heartbeat():
                pass
            case Goodbye():
                self.goodbye = True
                self._owner.said_goodbye(self, frame.reason)
            case PeerTable():
                self._owner.table_received(self, frame)
            case StatusRequest() | Status():
                self._owner.status_received(self, frame)
            case Load() | Loaded():
                self._owner.load_received(self, frame)
            case Announce() | Retract() | Refuse() | Form() | Broken() | Left():
                self._sink.membership_event(membership_events.FrameArrived(self.node, frame))
            case Trouble() | Prepare() | Promise() | Accept() | Accepted() | Committed():
                self._sink.membership_event(membership_events.FrameArrived(self.node, frame))
            case _:
                self._sink.engine_event(engine_events.FrameArrived(self.node, frame))

    def received(self, link: Link, receive: int, offset: int, nbytes: int, tag: int) -> None:  # noqa: D102
        self._sink.received(link, receive, offset, nbytes, tag)

    def receive_cancelled(self, link: Link, receive: int) -> None:  # noqa: D102
        self._sink.receive_cancelled(link, receive)

    def sent(self, link: Link, send: int) -> None:  # noqa: D102
        self._sink.sent(link, send)

    def closed(self, link: Link, error: AllReducedError | None) -> None:  # noqa: D102
        self._link = link
        self._owner.ended(self, error)
        self._sink.closed(link)
        self.over.set()
