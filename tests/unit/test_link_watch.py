"""When links are looked at, and what must have happened before."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

from tests.support.virtual_loop import VirtualLoop, run_virtually

from allreduced.core.errors import AllReducedError
from allreduced.core.identity import PeerIdentity
from allreduced.daemon.link_watch import LinkWatch
from allreduced.daemon.membership.events import PeerDown
from allreduced.daemon.membership.liveness import Liveness, Look
from allreduced.daemon.peer_link import LinkOwner, PeerLink
from allreduced.daemon.timing import derived
from allreduced.protocol.handshake import HIGHEST_VERSION
from allreduced.transports.base import Link, LinkStats


class FakeLink(Link):
    """A link whose signs of life the test gives."""

    def __init__(self) -> None:
        self.peer = PeerIdentity("b", 1)
        self.version = HIGHEST_VERSION
        self.initiator = True
        self.remote_address = self.local_address = "fake://"
        self.stats = LinkStats()
        self.last_received = asyncio.get_running_loop().time()
        self.sent_at: list[float] = []

    def send_control(self, payload: bytes) -> None:
        self.sent_at.append(asyncio.get_running_loop().time())

    def post_receive(self, receive: int, buffer: memoryview) -> bytes:
        raise NotImplementedError

    def cancel_receive(self, receive: int) -> None:
        raise NotImplementedError

    def send(
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
        raise NotImplementedError

    def cancel_send(self, send: int) -> None:
        raise NotImplementedError

    def abort(self, error: AllReducedError) -> None:
        raise NotImplementedError

    async def close(self, timeout: float) -> None:
        raise NotImplementedError


class Owner(LinkOwner):
    """Wants nothing; the watch is given its links by the test."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def introduce(self, link: PeerLink) -> None: ...
    def first_frame(self, link: PeerLink) -> None: ...
    def turned_away(self, link: PeerLink, reason: str) -> None: ...
    def said_goodbye(self, link: PeerLink, reason: str) -> None: ...
    def table_received(self, link: PeerLink, table: object) -> None: ...
    def status_received(self, link: PeerLink, frame: object) -> None: ...
    def load_received(self, link: PeerLink, frame: object) -> None: ...
    def ended(self, link: PeerLink, error: AllReducedError | None) -> None: ...


class Sink:
    """Has the loop's clock."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def engine_event(self, event: object) -> None: ...
    def membership_event(self, event: object) -> None: ...
    def received(self, link: Link, receive: int, offset: int, nbytes: int, tag: int) -> None: ...
    def receive_cancelled(self, link: Link, receive: int) -> None: ...
    def sent(self, link: Link, send: int) -> None: ...
    def closed(self, link: Link) -> None: ...


@dataclass
class Watched:
    """One link under watch."""

    timeout: float
    looks: list[tuple[float, Look]] = field(default_factory=list)
    looked: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        timing, sink = derived(self.timeout), Sink()
        self.link = FakeLink()
        peer_link = PeerLink(Owner(sink))
        peer_link.open(self.link)
        self.links = {"b": peer_link}
        self.liveness = Liveness(timing)
        self.watch = LinkWatch(self.liveness, timing, sink, self.links, self._looked)
        self.liveness.link_up("b", 1, sink.now())
        self.watch.start()

    def _looked(self, look: Look, now: float) -> None:
        self.looks.append((now, look))
        if look.silent:
            self.links.clear()
        self.looked.set()

    async def silence(self) -> float:
        """Return when the silence was noticed."""
        while True:
            await self.looked.wait()
            self.looked.clear()
            now, look = self.looks[-1]
            if look.silent:
                assert isinstance(look.verdicts[0], PeerDown)
                return now


def test_silence_is_noticed_at_the_very_end_of_the_timeout() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        watched, last = Watched(8.0), 0.0
        for quiet in (0.3, 1.7, 6.4, 7.9):
            await asyncio.sleep(quiet)
            assert not any(look.silent for _, look in watched.looks)
            watched.link.last_received = last = loop.time()
        assert last + 8.0 <= await watched.silence() <= last + 8.0 + 1e-6
        watched.watch.close()

    run_virtually(run())


def test_a_quiet_link_gets_a_heartbeat_in_each_eighth_of_the_timeout() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        watched = Watched(8.0)
        begin = loop.time()
        await asyncio.sleep(7.5)
        watched.watch.close()
        assert [round(at - begin, 6) for at in watched.link.sent_at] == [1, 2, 3, 4, 5, 6, 7]

    run_virtually(run())


def test_a_stall_of_this_agent_moves_the_end_of_the_timeout_on() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        watched = Watched(8.0)
        begin = loop.time()
        await asyncio.sleep(5.5)
        loop.stall(100.0)  # a look was due half a second later
        assert begin + 107.5 - 1e-6 <= await watched.silence() <= begin + 108.0
        assert max(look.stall for _, look in watched.looks) == 99.5
        watched.watch.close()

    run_virtually(run())


def test_nobody_is_judged_before_what_came_in_was_read() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        watched = Watched(8.0)
        reading, writing = os.pipe()

        def heard() -> None:
            os.read(reading, 1)
            watched.link.last_received = loop.time()

        def stopped() -> None:
            """Let something come in while the process is stopped, of which the loop does not know when it wakes."""
            if loop.time() >= watched.link.last_received + 8.0:
                os.write(writing, b"x")

        loop.add_reader(reading, heard)
        loop.asleep = stopped
        await asyncio.sleep(100.0)
        assert not any(look.silent for _, look in watched.looks)
        assert watched.link.last_received > loop.time() - 8.0
        loop.asleep = None
        await watched.silence()
        watched.watch.close()
        loop.remove_reader(reading)
        os.close(reading)
        os.close(writing)

    run_virtually(run())
