"""One link between two processes: 64 MiB from one to the other, again and again."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import mmap
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tests.rdma.nursery import Copy

from allreduced.core.errors import AllReducedError
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.transports.base import Link, LinkEvents, LinkOptions, LinkStats
from allreduced.transports.registry import scheme_of, transport

TILE = 1 << 20
SECONDS = 60.0
SECRET = b"benchmark"


@dataclass(frozen=True)
class Transfers:
    """What the transfers over one link took, in seconds, and what both ends counted meanwhile."""

    sending: list[float]
    """From the call of ``send`` to the word of the other end that everything is there."""
    whole: list[float]
    """The same with what comes before it: the other end posts its memory and answers with the token."""
    tiles: int
    near: LinkStats
    far: LinkStats


def options(node: str) -> LinkOptions:
    """Return what both ends are made with: as an agent's links by default, but frames as large as perftest's."""
    return LinkOptions(SecretAuthenticator(node, len(node), SECRET), max_frame=TILE)


def pattern(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """Return bytes that differ from transfer to transfer."""
    return (np.arange(nbytes, dtype=np.int64) * 7 + seed).astype(np.uint8)


class Far(LinkEvents):
    """The receiving end: posts its memory when it is asked to, checks what came, and says so."""

    def __init__(self) -> None:
        self.over = asyncio.get_running_loop().create_future()
        self._memory = mmap.mmap(-1, 1)
        self._left = self._number = 0

    def control_received(self, link: Link, payload: bytes) -> None:
        """Take an order: post so many bytes, check what came, or tell the counters."""
        order = json.loads(payload)
        if order["do"] == "post":
            if len(self._memory) != order["nbytes"]:
                self._memory = mmap.mmap(-1, order["nbytes"])
            self._left, self._number = len(self._memory), self._number + 1
            link.send_control(link.post_receive(self._number, memoryview(self._memory)))
        elif order["do"] == "check":
            right = np.array_equal(np.frombuffer(self._memory, np.uint8), pattern(len(self._memory), order["seed"]))
            link.send_control(b"right" if right else b"wrong")
        else:
            link.send_control(json.dumps(dataclasses.asdict(link.stats)).encode())

    def received(self, link: Link, receive: int, offset: int, nbytes: int, tag: int) -> None:
        """Say when everything is there."""
        self._left -= nbytes
        if not self._left:
            link.send_control(b"done")

    def receive_cancelled(self, link: Link, receive: int) -> None:
        """Nothing is cancelled here."""

    def sent(self, link: Link, send: int) -> None:
        """Nothing is sent here."""

    def closed(self, link: Link, error: AllReducedError | None) -> None:
        """End."""
        self.over.set_result(None)


class Near(LinkEvents):
    """The sending end."""

    def __init__(self) -> None:
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self.sent_last = asyncio.Event()

    async def answer(self) -> bytes:
        """Return the next answer of the other end."""
        async with asyncio.timeout(SECONDS):
            return await self._answers.get()

    def control_received(self, link: Link, payload: bytes) -> None:
        """Take an answer."""
        self._answers.put_nowait(payload)

    def received(self, link: Link, receive: int, offset: int, nbytes: int, tag: int) -> None:
        """Nothing is received here."""

    def receive_cancelled(self, link: Link, receive: int) -> None:
        """Nothing is cancelled here."""

    def sent(self, link: Link, send: int) -> None:
        """Take note that the memory is free."""
        self.sent_last.set()

    def closed(self, link: Link, error: AllReducedError | None) -> None:
        """Let whoever waits know."""
        self._answers.put_nowait(b"closed")
        self.sent_last.set()


def serve(words: list[str]) -> int:
    """Be the far end: listen at the address, write where, and serve one link. Run by the nursery."""

    async def run() -> None:
        made: asyncio.Queue[Far] = asyncio.Queue()

        def accepted(link: Link) -> LinkEvents:
            far = Far()
            made.put_nowait(far)
            return far

        address = words[0]
        listener = await transport(scheme_of(address)).listen(address, accepted, options("far"))
        sys.stdout.write(listener.address + "\n")
        sys.stdout.flush()
        far = await made.get()
        await far.over
        await listener.close()

    asyncio.run(run())
    return 0


def measure(start: Callable[[str], Copy], address: str, nbytes: int, times: int) -> Transfers:
    """Send ``nbytes`` that often, once more before it counts; check everything that comes.

    :raises SystemExit: something wrong came.
    """
    far = start(address)
    assert far.stdout is not None
    assert far.stdin is not None
    try:
        listening = far.stdout.readline().decode().strip()
        if not listening:
            raise SystemExit(f"nobody listens at {address}")
        return asyncio.run(_measure(listening, nbytes, times))
    finally:
        far.kill()
        far.wait()
        far.stdin.close()
        far.stdout.close()


async def _measure(address: str, nbytes: int, times: int) -> Transfers:
    near = Near()
    link = await transport(scheme_of(address)).connect(address, near, options("near"))
    source = mmap.mmap(-1, nbytes)
    sending, whole, before = [], [], await _counted(link, near)
    for number in range(times + 1):
        np.frombuffer(source, np.uint8)[:] = pattern(nbytes, number)
        if number == 1:
            before = await _counted(link, near)
        near.sent_last.clear()
        began = time.perf_counter()
        link.send_control(json.dumps({"do": "post", "nbytes": nbytes}).encode())
        token = await near.answer()
        posted = time.perf_counter()
        link.send(number, token, 0, memoryview(source))
        if await near.answer() != b"done":
            raise SystemExit("the link broke")
        end = time.perf_counter()
        await near.sent_last.wait()
        link.send_control(json.dumps({"do": "check", "seed": number}).encode())
        if await near.answer() != b"right":
            raise SystemExit(f"wrong bytes in transfer {number} over {address}")
        if number:
            sending.append(end - posted)
            whole.append(end - began)
    after = await _counted(link, near)
    await link.close(SECONDS)
    tiles = times * -(-nbytes // TILE)
    return Transfers(sending, whole, tiles, _difference(after[0], before[0]), _difference(after[1], before[1]))


async def _counted(link: Link, near: Near) -> tuple[LinkStats, LinkStats]:
    link.send_control(json.dumps({"do": "count"}).encode())
    far = LinkStats(**json.loads(await near.answer()))
    return dataclasses.replace(link.stats), far


def _difference(after: LinkStats, before: LinkStats) -> LinkStats:
    values = dataclasses.asdict(before)
    return LinkStats(**{name: value - values[name] for name, value in dataclasses.asdict(after).items()})
