"""The verbs module on the real thing: what it promises in ``verbs_port``, and how it fails."""

from __future__ import annotations

import contextlib
import ipaddress
import mmap
import select
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from allreduced.transports.rdma import verbs
from allreduced.transports.rdma.devices import choose
from allreduced.transports.rdma.memory import address_of
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.verbs_port import (
    Completion,
    CompletionKind,
    CompletionQueue,
    Domain,
    LocalPort,
    PathTo,
    QueuePair,
    ReceiveRequest,
    Region,
    SendKind,
    SendRequest,
    VerbsError,
)

SECONDS = 20.0
DEPTH = 16
INLINE = 64


@dataclass
class End:
    """One end of a connected queue pair, with a page of memory that the other end may write to."""

    domain: Domain
    queue: CompletionQueue
    pair: QueuePair
    memory: mmap.mmap
    address: int
    region: Region

    def receive(self, count: int = 1, length: int = 0) -> None:
        """Post receive requests for ``length`` bytes at the beginning of the memory."""
        wanted = [ReceiveRequest(k, self.address, length, self.region.local_key) for k in range(count)]
        self.pair.post_receive(wanted)

    def next(self) -> Completion:
        """Return what completes next, as a link does: by the event."""
        self.queue.arm()
        while not (done := self.queue.poll(1)):
            readable, _, _ = select.select([self.queue.descriptor], [], [], SECONDS)
            assert readable, "no completion event"
            self.queue.take_event()
            self.queue.arm()
        return done[0]


def local_port() -> LocalPort:
    """Return the port of the first node."""
    return choose(verbs.load().devices(), RdmaOptions(), "10.77.0.1")


def connect(one: QueuePair, other: QueuePair, port: LocalPort, retry_count: int = 1) -> None:
    """Connect both ends of a pair."""
    for pair, remote in ((one, other), (other, one)):
        pair.connect(
            PathTo(
                local=port,
                mtu=port.mtu,
                remote_gid=port.gid.gid,
                remote_lid=port.lid,
                remote_pair=remote.number,
                local_psn=pair.number & 0xFFF,
                remote_psn=remote.number & 0xFFF,
                timeout=10,
                retry_count=retry_count,
                rnr_retry=0,
                traffic_class=0,
                service_level=0,
                hop_limit=64,
            )
        )


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    """Return two ends that are connected; each has its own protection domain."""
    port = local_port()
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(contextlib.closing(verbs.load().open("rxe0")))

        def end() -> End:
            domain = stack.enter_context(contextlib.closing(device.create_domain()))
            queue = stack.enter_context(contextlib.closing(device.create_queue(4 * DEPTH)))
            memory = mmap.mmap(-1, mmap.PAGESIZE)
            address = address_of(memoryview(memory))
            region = stack.enter_context(
                contextlib.closing(domain.register(address, mmap.PAGESIZE, local_write=True, remote_write=True))
            )
            pair = domain.create_pair(
                queue, queue, send_depth=DEPTH, receive_depth=DEPTH, max_inline=INLINE, port=port.port
            )
            stack.enter_context(contextlib.closing(pair))
            return End(domain, queue, pair, memory, address, region)

        both = end(), end()
        connect(both[0].pair, both[1].pair, port)
        yield both


def write(near: End, far: End, length: int, immediate: int = 0, *, key: int | None = None, at: int = 0) -> SendRequest:
    """Return a request that writes the beginning of one memory into the other."""
    return SendRequest(
        identifier=7,
        kind=SendKind.WRITE_WITH_IMMEDIATE,
        address=near.address,
        length=length,
        key=near.region.local_key,
        remote_address=far.address + at,
        remote_key=far.region.remote_key if key is None else key,
        immediate=immediate,
    )


def test_every_address_of_the_interface_is_a_gid_of_roce_v2() -> None:
    (device,) = (device for device in verbs.load().devices() if device.name == "rxe0")
    (port,) = device.ports
    assert (device.problem, port.state, port.link_layer, port.active_mtu) == ("", "active", "ethernet", 4096)
    assert port.max_message >= 8 << 20
    assert device.max_queue_pairs > 1000
    by_gid = {entry.gid: entry for entry in port.gids}
    for node in range(1, 5):
        for text in (f"::ffff:10.77.0.{node}", f"fd77::{node}"):
            entry = by_gid[ipaddress.IPv6Address(text).packed]
            assert (entry.kind, entry.interface) == ("roce_v2", "rdma0")


def test_a_write_lands_in_its_place_and_its_immediate_is_told(ends: tuple[End, End]) -> None:
    near, far = ends
    near.memory[:1000] = bytes(k % 251 for k in range(1000))
    far.receive()
    near.pair.post_send([write(near, far, 1000, 0xFEDCBA98, at=96)])
    landed = far.next()
    assert (landed.kind, landed.length, landed.immediate, landed.error) == (
        CompletionKind.WRITTEN,
        1000,
        0xFEDCBA98,
        "",
    )
    assert landed.pair == far.pair.number
    assert far.memory[96:1096] == near.memory[:1000]
    assert far.memory[:96] == bytes(96)
    sent = near.next()
    assert (sent.kind, sent.identifier, sent.error) == (CompletionKind.SENT, 7, "")


def test_inline_bytes_are_taken_within_the_call(ends: tuple[End, End]) -> None:
    near, far = ends
    assert near.pair.max_inline >= INLINE
    far.receive(length=INLINE)
    near.memory[:INLINE] = bytes(range(INLINE))
    near.pair.post_send([SendRequest(1, SendKind.SEND, near.address, INLINE, 0, inline=True)])
    near.memory[:INLINE] = bytes(INLINE)
    came = far.next()
    assert (came.kind, came.length) == (CompletionKind.RECEIVED, INLINE)
    assert far.memory[:INLINE] == bytes(range(INLINE))


def test_requests_of_a_chain_complete_in_order_and_only_the_last_is_told(ends: tuple[End, End]) -> None:
    near, far = ends
    far.receive(3)
    chain = [write(near, far, 10, k) for k in range(3)]
    for place, request in enumerate(chain):
        request.identifier, request.signalled = place, place == 2
    near.pair.post_send(chain)
    assert [far.next().immediate for _ in range(3)] == [0, 1, 2]
    assert near.next().identifier == 2
    assert near.queue.poll(8) == []


def test_a_key_that_was_given_back_reaches_nothing(ends: tuple[End, End]) -> None:
    near, far = ends
    key = far.region.remote_key
    far.region.close()
    far.receive()
    near.memory[:4] = b"evil"
    near.pair.post_send([write(near, far, 4, key=key)])
    assert "refuses access" in near.next().error
    assert far.memory[:4] == bytes(4)


def test_a_key_of_another_domain_reaches_nothing(ends: tuple[End, End]) -> None:
    """What is registered for one peer cannot be written by another one."""
    near, far = ends
    far.receive()
    near.memory[:4] = b"evil"
    # near's own key, which far's pair does not accept: it belongs to near's domain
    request = write(near, far, 4, key=near.region.remote_key)
    request.remote_address = near.address + 100
    near.pair.post_send([request])
    assert "refuses access" in near.next().error
    assert near.memory[100:104] == bytes(4)


def test_after_an_error_everything_is_given_back_as_flushed(ends: tuple[End, End]) -> None:
    near, far = ends
    near.receive(3)
    near.pair.post_send([write(near, far, 4, key=1), write(near, far, 4)])
    errors = [near.next() for _ in range(5)]
    assert [error.flushed for error in errors].count(True) == 4
    assert all(error.error for error in errors)


def test_a_receiver_without_requests_ends_the_pair(ends: tuple[End, End]) -> None:
    near, far = ends
    near.pair.post_send([write(near, far, 4)])
    assert "no receive request" in near.next().error


def test_a_queue_that_is_full_says_so(ends: tuple[End, End]) -> None:
    near, _ = ends
    with contextlib.suppress(VerbsError):
        for _ in range(20 * DEPTH):  # a device may round the depth up
            near.receive()
    with pytest.raises(VerbsError, match="receive request") as caught:
        near.receive()
    assert caught.value.errno


def test_a_peer_that_is_gone_is_noticed_by_missing_acknowledgements(ends: tuple[End, End]) -> None:
    near, far = ends
    far.pair.close()
    near.pair.post_send([write(near, far, 4)])
    assert "no acknowledgement" in near.next().error


def test_closing_twice_is_no_error(ends: tuple[End, End]) -> None:
    near, _ = ends
    for part in (near.pair, near.region, near.queue, near.domain):
        part.close()
        part.close()


def test_memory_that_is_not_there_is_refused(ends: tuple[End, End]) -> None:
    with pytest.raises(VerbsError, match="cannot register"):
        ends[0].domain.register(1 << 46, 4096, local_write=True, remote_write=True)


def test_there_is_no_device_of_another_name() -> None:
    with pytest.raises(VerbsError, match="mlx9_0"):
        verbs.load().open("mlx9_0")
