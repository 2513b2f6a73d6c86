"""Finds out whom this agent can dial, and how fast its links are, when somebody asks (``allreduced doctor``)."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from allreduced.core.addresses import parse_address
from allreduced.core.errors import ConfigError
from allreduced.core.resolver import look_up
from allreduced.daemon.ports import ReachablePeer
from allreduced.protocol.peer import MAX_LOAD, SINCE, Frame, Load, Loaded, LoadFrame
from allreduced.protocol.status import ReachReport

DIAL_TIMEOUT = 2.0
"""Seconds after which an address that says nothing counts as silent."""

TRIES = 3
"""Times that an address which can be reached is dialled; the shortest time counts."""

LOADS = 16
"""Loads of ``MAX_LOAD`` bytes that the speed of one link is measured with."""

LOAD_TIMEOUT = 2.0
"""Seconds that measuring one link takes at most."""

_AT_ONCE = 2
"""Loads under way: enough to keep a link busy, and heartbeats never wait long behind them."""

_NO_ANSWER = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)


class ReachPeers(Protocol):
    """The peer plane, as far as it is needed here."""

    def view(self) -> tuple[ReachablePeer, ...]:
        """Return the peers that can be reached now."""

    def wanted(self) -> tuple[tuple[str, str], ...]:
        """Return (node, address) of the agents that are dialled and have no link; the node may be empty."""

    def send_frame(self, node: str, frame: Frame) -> None:
        """Send a control frame; dropped where there is no link."""


@dataclass(frozen=True, slots=True)
class Dialled:
    """What came of dialling an address once: the fields of ReachReport."""

    outcome: str
    detail: str
    seconds: float


async def dial_once(address: str, timeout: float = DIAL_TIMEOUT) -> Dialled:
    """Open a TCP connection to ``scheme://host:port`` and close it again, within ``timeout`` seconds.

    Each address of a name is tried in turn. Nothing is sent, so this proves a way, and not who is at its end.
    """
    try:
        parsed = parse_address(address)
    except ConfigError as error:
        return Dialled("failed", error.message, 0.0)
    begin = time.perf_counter()  # uvloop's own time comes in milliseconds
    try:
        async with asyncio.timeout(timeout):
            await _open(parsed.host, parsed.port)
    except TimeoutError:
        return Dialled("silent", f"nothing came back within {timeout:g} s", 0.0)
    except socket.gaierror as error:
        return Dialled("unknown", f"{parsed.host}: {error.strerror}", 0.0)
    except OSError as error:
        return failure(error)
    return Dialled("reached", "", time.perf_counter() - begin)


async def _open(host: str, port: int) -> None:
    """Connect to the first address of a host that answers, and hang up.

    :raises OSError: none does; the last one's reason.
    """
    reason = OSError(errno.EADDRNOTAVAIL, f"{host} has no address")
    for family, address in await look_up(host, port):
        with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sock:
            try:
                await asyncio.get_running_loop().sock_connect(sock, address)
            except OSError as error:
                reason = error
            else:
                return
    raise reason


def failure(error: OSError) -> Dialled:
    """Return what an error of ``connect`` says about the way to an address. Pure."""
    reason = os.strerror(error.errno) if error.errno else str(error)  # asyncio puts the address in its place
    if error.errno == errno.ECONNREFUSED or isinstance(error, ConnectionRefusedError):
        return Dialled("refused", reason, 0.0)
    if error.errno in _NO_ANSWER:
        return Dialled("silent", reason, 0.0)
    return Dialled("failed", reason, 0.0)


class ReachService:
    """Dials all other agents when asked, each at the address that it tells, and measures links. Use it on one loop.

    ``dial``: as :func:`dial_once`.
    """

    def __init__(self, peers: ReachPeers, *, dial: Callable[[str], Awaitable[Dialled]] = dial_once) -> None:
        self._peers = peers
        self._dial = dial
        self._waiting: dict[int, tuple[str, asyncio.Event]] = {}
        self._number = 0
        self._measuring = asyncio.Lock()

    async def examine(self, *, bandwidth: bool) -> tuple[ReachReport, ...]:
        """Return what came of dialling every other agent that is known, by name; all are dialled at once.

        Takes some ``DIAL_TIMEOUT`` at most, and ``LOAD_TIMEOUT`` for each link where ``bandwidth`` is asked for: links
        are measured one after the other.
        """
        up = self._peers.view()
        places = [(peer.node, peer.address) for peer in up] + list(self._peers.wanted())
        dialled = await asyncio.gather(*(self._dial_known(address) for _, address in places))
        speeds: dict[str, int] = {}
        if bandwidth:
            for peer in up:
                if peer.version >= SINCE[Load]:  # an agent of an earlier version does not answer
                    speeds[peer.node] = await self._measure(peer.node)
        found = [
            ReachReport(node, address, one.outcome, one.detail, one.seconds, speeds.get(node, 0))
            for (node, address), one in zip(places, dialled, strict=True)
        ]
        return tuple(sorted(found, key=lambda one: (one.node, one.address)))

    def frame_arrived(self, node: str, frame: LoadFrame) -> None:
        """Answer a Load, or take the answer to one; others are ignored."""
        if isinstance(frame, Load):
            self._peers.send_frame(node, Loaded(frame.number))
            return
        asked = self._waiting.get(frame.number)
        if asked is not None and asked[0] == node:
            asked[1].set()

    async def _dial_known(self, address: str) -> Dialled:
        """Dial, and again to be sure of the time: the first may have met with a busy machine."""
        if not address:
            return Dialled("unknown", "it tells no address, so only it can dial", 0.0)
        best = await self._dial(address)
        for _ in range(TRIES - 1):
            if best.outcome != "reached":
                break
            again = await self._dial(address)
            best = min(best, again, key=lambda one: (one.outcome != "reached", one.seconds))
        return best

    async def _measure(self, node: str) -> int:
        """Return the bytes per second that reach ``node`` over its link; 0 where it does not answer in time."""
        data = bytes(MAX_LOAD)
        async with self._measuring:
            begin = time.perf_counter()
            try:
                async with asyncio.timeout(LOAD_TIMEOUT):
                    await asyncio.gather(*(self._send(node, data, LOADS // _AT_ONCE) for _ in range(_AT_ONCE)))
            except TimeoutError:
                return 0
            return int(LOADS * MAX_LOAD / max(time.perf_counter() - begin, 1e-9))

    async def _send(self, node: str, data: bytes, times: int) -> None:
        for _ in range(times):
            self._number += 1
            number, came = self._number, asyncio.Event()
            self._waiting[number] = (node, came)
            try:
                self._peers.send_frame(node, Load(number, data))
                await came.wait()
            finally:
                del self._waiting[number]


def longest(links: int, *, bandwidth: bool) -> float:
    """Return the seconds that :meth:`ReachService.examine` takes at most, with ``links`` links. Pure."""
    return TRIES * DIAL_TIMEOUT + (links * LOAD_TIMEOUT if bandwidth else 0.0)
