"""What RDMA costs, as far as it can be told without a device: requests of pyverbs, the bookkeeping of a link, pinning.

    python -m benchmarks.rdma_cost

The link runs over verbs that copy bytes within this process (tests/support/fake_verbs.py), whose own cost is in the
figure: it is more than what both ends of a link cost without them. Pages are pinned by io_uring, for which the kernel
does the same as for a memory region, less what the device itself does. Run it from the root of the repository. What is
not installed or not allowed is left out.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import mmap
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tests.support.fake_verbs import FakeFabric, FakeVerbs

from allreduced.core.errors import AgentUnavailable, AllReducedError
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.transports.base import Link, LinkEvents, LinkOptions
from allreduced.transports.rdma.transport import RdmaTransport

FRAME = 16 << 10
"""Bytes: large enough to be written straight into place, small enough that copying them hardly counts."""

FRAMES = 4096
REQUESTS = 20_000
PINNED = 64 << 20
RUNS = 7

_IO_URING_SETUP = 425
_IO_URING_REGISTER = 427
_REGISTER_BUFFERS = 0
_UNREGISTER_BUFFERS = 1
_PARAMETERS = 120
"""Bytes of ``struct io_uring_params``."""
_MADV_POPULATE_WRITE = 23


class Events(LinkEvents):
    """Waits for the last byte."""

    def __init__(self) -> None:
        self.missing = FRAME * FRAMES
        self.all_there = asyncio.Event()
        self.over = asyncio.Event()

    def control_received(self, link: Link, payload: bytes) -> None:
        pass

    def received(self, link: Link, receive: int, offset: int, nbytes: int, tag: int) -> None:
        self.missing -= nbytes
        if not self.missing:
            self.all_there.set()

    def receive_cancelled(self, link: Link, receive: int) -> None:
        pass

    def sent(self, link: Link, send: int) -> None:
        pass

    def closed(self, link: Link, error: AllReducedError | None) -> None:
        self.over.set()


async def by_link() -> float:
    """Return microseconds of processor time for each frame over a link, both ends and the verbs together."""
    fabric = FakeFabric()
    transport = RdmaTransport(lambda: FakeVerbs(fabric))
    accepted: asyncio.Queue[tuple[Link, Events]] = asyncio.Queue()

    def accept(link: Link) -> LinkEvents:
        events = Events()
        accepted.put_nowait((link, events))
        return events

    def options(name: str, incarnation: int) -> LinkOptions:
        return LinkOptions(SecretAuthenticator(name, incarnation, b""), flows=2, max_frame=FRAME)

    listener = await transport.listen("rdma://127.0.0.1:0", accept, options("b", 2))
    near_events = Events()
    near = await transport.connect(listener.address, near_events, options("a", 1))
    far, far_events = await accepted.get()
    source, target = np.ones(FRAME * FRAMES, np.uint8), np.zeros(FRAME * FRAMES, np.uint8)
    begin = time.process_time()
    near.send(1, far.post_receive(1, target.data), 0, source.data)
    await far_events.all_there.wait()
    taken = time.process_time() - begin
    if not np.array_equal(source, target):
        raise SystemExit("the bytes that arrived are others")
    await listener.close()
    for link, events in ((near, near_events), (far, far_events)):
        link.abort(AgentUnavailable("the measurement is over"))
        await events.over.wait()
    return taken / FRAMES * 1e6


def requests() -> tuple[float, float] | None:
    """Return microseconds to make and free a send and a receive request of pyverbs; None where it is not installed."""
    try:
        wr: Any = importlib.import_module("pyverbs.wr")
    except ImportError:
        return None

    def send(number: int) -> None:
        element = wr.SGE(1 << 40, FRAME, 77)
        request = wr.SendWR(wr_id=number, opcode=1, num_sge=1, imm_data=number, sg=[element], send_flags=2)
        request.set_wr_rdma(99, 1 << 41)
        request.close()
        element.close()

    def receive(number: int) -> None:
        element = wr.SGE(1 << 40, FRAME, 77)
        request = wr.RecvWR(wr_id=number, num_sge=1, sg=[element])
        request.close()
        element.close()

    return _each(send), _each(receive)


def _each(make: Callable[[int], None]) -> float:
    begin = time.process_time()
    for number in range(REQUESTS):
        make(number)
    return (time.process_time() - begin) / REQUESTS * 1e6


def pinning() -> tuple[float, float] | None:
    """Return microseconds to pin and to unpin a MiB of a memfd, its pages present; None where it is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    ring = libc.syscall(_IO_URING_SETUP, 8, ctypes.create_string_buffer(_PARAMETERS))
    if ring < 0:
        return None
    memory = os.memfd_create("pinned")
    os.posix_fallocate(memory, 0, PINNED)
    mapping = mmap.mmap(memory, PINNED)
    mapping.madvise(_MADV_POPULATE_WRITE)
    first = ctypes.c_char.from_buffer(mapping)
    vector = (ctypes.c_uint64 * 2)(ctypes.addressof(first), PINNED)
    pin, unpin = [], []
    for _ in range(RUNS):
        begin = time.perf_counter()
        if libc.syscall(_IO_URING_REGISTER, ring, _REGISTER_BUFFERS, vector, 1) < 0:
            return None
        between = time.perf_counter()
        libc.syscall(_IO_URING_REGISTER, ring, _UNREGISTER_BUFFERS, None, 0)
        pin.append(between - begin)
        unpin.append(time.perf_counter() - between)
    os.close(ring)
    mebibytes = PINNED >> 20
    return statistics.median(pin) / mebibytes * 1e6, statistics.median(unpin) / mebibytes * 1e6


def main() -> None:
    pinned = pinning()
    if pinned is None:
        print("pinning: io_uring is not allowed here")
    else:
        print(f"pages of 4 KiB: pinned in {pinned[0]:.0f} us for a MiB, unpinned in {pinned[1]:.0f} us")
    made = requests()
    if made is None:
        print("requests of pyverbs: it is not installed")
    else:
        print(f"requests of pyverbs, made and freed: send {made[0]:.1f} us, receive {made[1]:.1f} us")
    link = statistics.median(asyncio.run(by_link()) for _ in range(RUNS))
    print(f"a frame over a link, both ends and the verbs of the test together: {link:.0f} us")


if __name__ == "__main__":
    main()
