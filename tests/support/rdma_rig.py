"""Two ends of an RDMA link on verbs without a device, and a hand on what they send."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from tests.contract.conftest import BOUND, Recorder
from tests.support.fake_verbs import FakeFabric, FakePair, FakeVerbs

from allreduced.core.errors import AgentUnavailable
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.transports.base import Link, LinkEvents, LinkOptions
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.transport import AutoTransport, RdmaTransport
from allreduced.transports.rdma.verbs_port import SendKind, SendRequest, Verbs

SECRET = b"hush"


def options(node: str, incarnation: int, **changes: object) -> LinkOptions:
    """Return options of an agent; frames of 64 KiB, RDMA queues of 32 requests."""
    made = LinkOptions(
        SecretAuthenticator(node, incarnation, SECRET), flows=1, max_frame=64 << 10, rdma=RdmaOptions(depth=32)
    )
    return replace(made, **changes)  # type: ignore[arg-type] # the fields of a test are right or fail it


@dataclass
class Rig:
    """A link, both ends, and the fabric below."""

    fabric: FakeFabric
    near: Link
    far: Link
    near_events: Recorder
    far_events: Recorder
    near_pairs: list[FakePair]
    far_pairs: list[FakePair]

    async def until_closed(self) -> None:
        """Return once both ends are over."""
        await self.near_events.until_closed()
        await self.far_events.until_closed()

    def reason(self, events: Recorder) -> str:
        """Return why an end is over."""
        error = events.ends[0]
        assert error is not None
        return error.message

    def forge(
        self, data: bytes, *, kind: SendKind = SendKind.SEND, immediate: int = 0, key: int = 0, address: int = 0
    ) -> None:
        """Let the near queue pair send what the link would not; up to 64 bytes."""
        buffer = ctypes.create_string_buffer(data, len(data))
        request = SendRequest(
            0,
            kind,
            ctypes.addressof(buffer),
            len(data),
            0,
            signalled=False,
            inline=True,
            immediate=immediate,
            remote_key=key,
            remote_address=address,
        )
        self.near_pairs[0].post_send([request])


async def turns(count: int = 20) -> None:
    """Let the loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


async def turns_until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until the condition holds."""
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110 - bytes in memory set no event
            await asyncio.sleep(0)


@asynccontextmanager
async def rig(
    fabric: FakeFabric | None = None,
    *,
    near: LinkOptions | None = None,
    far: LinkOptions | None = None,
    near_verbs: Callable[[], Verbs] | None = None,
    far_verbs: Callable[[], Verbs] | None = None,
    auto: bool = False,
    address: str = "127.0.0.1",
    listening: AutoTransport | None = None,
) -> AsyncIterator[Rig]:
    """Yield a fresh link between agents ``a`` (dials) and ``b``; nothing of it is open afterwards."""
    fabric = fabric or FakeFabric()
    kind = AutoTransport if auto else RdmaTransport
    dialler = kind(near_verbs or (lambda: FakeVerbs(fabric)))
    listens = listening or kind(far_verbs or (lambda: FakeVerbs(fabric)))
    queue: asyncio.Queue[tuple[Link, Recorder]] = asyncio.Queue()

    def accepted(link: Link) -> LinkEvents:
        recorder = Recorder()
        queue.put_nowait((link, recorder))
        return recorder

    before = set(fabric.pairs)
    listener = await listens.listen(f"{kind.scheme}://{address}:0", accepted, far or options("b", 2))
    near_events = Recorder()
    try:
        near_link = await dialler.connect(listener.address, near_events, near or options("a", 1))
        far_link, far_events = await queue.get()
    finally:
        await listener.close()
    pairs = [fabric.pairs[number] for number in sorted(set(fabric.pairs) - before)]
    half = len(pairs) // 2
    try:
        yield Rig(fabric, near_link, far_link, near_events, far_events, pairs[:half], pairs[half:])
    finally:
        for link, events in ((near_link, near_events), (far_link, far_events)):
            link.abort(AgentUnavailable("the test is over"))
            await events.until_closed()
    if not before:
        assert fabric.leaks() == {}
