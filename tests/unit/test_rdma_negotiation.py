"""How two agents agree on RDMA or TCP for the data of a link, and what becomes of bad messages."""

from __future__ import annotations

import asyncio
import errno
import struct
from dataclasses import replace

import pytest
from tests.contract.conftest import Recorder, pattern
from tests.support.fake_verbs import RETRIES, FakeFabric, FakePair, FakeVerbs, device_info
from tests.support.rdma_rig import SECRET, Rig, options, rig

from allreduced.core.channel import Channel
from allreduced.core.errors import AgentUnavailable, ConfigError, ProtocolError
from allreduced.protocol.handshake import SecretAuthenticator
from allreduced.transports.base import Link, LinkEvents, LinkOptions
from allreduced.transports.rdma import negotiation
from allreduced.transports.rdma.dead_ends import PERIOD, DeadEnds
from allreduced.transports.rdma.devices import choose, gid_of
from allreduced.transports.rdma.negotiation import PairEnd, Side
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.transport import AutoTransport, RdmaTransport
from allreduced.transports.rdma.verbs_port import SendRequest, Verbs
from allreduced.transports.tcp import TcpTransport
from allreduced.transports.tcp.conversation import Conversation, declined
from allreduced.transports.tcp.dial import open_control, streams_of_a_link
from allreduced.transports.tcp.listener import TcpListener, _Assembly
from allreduced.transports.tcp.stream import PlainStream

SIDE = Side("ethernet", "roce_v2", bytes(15) + b"\1", 0, 4096, 32, 8192, 7, (PairEnd(17, 5), PairEnd(18, 6)))


async def _works(link: Rig) -> None:
    for k, size in ((1, 10), (2, 300_000)):
        there, back = bytearray(size), bytearray(size)
        link.near.send(k, link.far.post_receive(k, memoryview(there)), 0, memoryview(pattern(size, k)))
        link.far.send(k, link.near.post_receive(k, memoryview(back)), 0, memoryview(pattern(size, k)))
        await link.far_events.until_bytes(k, size)
        await link.near_events.until_bytes(k, size)
        assert there == back == pattern(size, k)


def _none() -> Verbs:
    raise ConfigError("RDMA cannot be used: pyverbs is not installed")


def test_messages_survive_the_wire() -> None:
    assert negotiation.read_offer(negotiation.offer(SIDE)) == negotiation.Offer(1, 1, SIDE)
    assert negotiation.read_answer(negotiation.answer(SIDE, 1)) == negotiation.Answer(1, SIDE)
    assert negotiation.common_version(negotiation.Offer(1, 9, SIDE)) == 1
    assert negotiation.common_version(negotiation.Offer(2, 9, SIDE)) is None


@pytest.mark.parametrize("at", range(len(negotiation.offer(SIDE))))
def test_messages_that_are_cut_are_refused(at: int) -> None:
    with pytest.raises(ProtocolError):
        negotiation.read_offer(negotiation.offer(SIDE)[:at])


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, b"\2", "kind 2"),
        (1, b"\5\0", "kind 1"),
        (5, b"\7", "link layer 7"),
        (6, b"\7", "cannot be"),
        (25, b"\1\0", "mtu 1"),
        (27, b"\1\0", "depth 1"),
        (29, b"\1\0\0\0", "messages of 1 "),
        (29, b"\1\0\2\0", "messages of 131073 "),
        (33, bytes(8), "cannot be"),
        (41, b"\1", "16 bytes for 1 queue pairs"),
        (45, b"\1", "24 bits"),
        (49, b"\1", "24 bits"),
    ],
)
def test_messages_that_make_no_sense_are_refused(at: int, value: bytes, says: str) -> None:
    data = bytearray(negotiation.offer(SIDE))
    data[at : at + len(value)] = value
    with pytest.raises(ProtocolError, match=says):
        negotiation.read_offer(bytes(data))


def test_an_answer_of_a_version_that_was_not_offered_is_refused() -> None:
    for version in (0, 2):
        with pytest.raises(ProtocolError, match=f"version {version}"):
            negotiation.read_answer(negotiation.answer(SIDE, version))


async def test_auto_takes_rdma_where_both_ends_have_it() -> None:
    async with rig(auto=True) as link:
        for end in (link.near, link.far):
            assert end.data_path.startswith("rdma fake0")
            assert end.fallback_reason == ""
        assert link.near.remote_address.startswith("auto://127.0.0.1:")
        await _works(link)


async def test_auto_over_ipv6() -> None:
    async with rig(auto=True, address="[::1]") as link:
        assert "GID 1 (::1" in link.near.data_path
        await _works(link)


@pytest.mark.parametrize("who", ["near", "far", "both"])
async def test_auto_takes_tcp_where_an_end_has_no_rdma_and_says_why(who: str) -> None:
    near, far = (_none if who in (end, "both") else None for end in ("near", "far"))
    async with rig(auto=True, near_verbs=near, far_verbs=far) as link:
        for end in (link.near, link.far):
            assert end.data_path == ""
            assert "pyverbs is not installed" in end.fallback_reason
        if who != "both":
            other = link.far if who == "near" else link.near
            assert other.fallback_reason.startswith("the other end declined: ")
        await _works(link)


async def test_auto_takes_tcp_where_no_gid_is_the_address() -> None:
    fabric = FakeFabric(device_info("fake0", "10.1.1.1"))
    async with rig(fabric, auto=True) as link:
        assert "127.0.0.1, the address through which the peer is reached" in link.near.fallback_reason
        await _works(link)


async def test_auto_takes_tcp_where_packets_do_not_get_through() -> None:
    fabric = FakeFabric()
    fabric.before = lambda pair, request: RETRIES
    async with rig(fabric, auto=True) as link:
        assert link.near.fallback_reason == f"127.0.0.1 cannot be reached by RDMA: {RETRIES}"
        assert link.far.fallback_reason == f"the other end declined: {link.near.fallback_reason}"
        await _works(link)


async def test_auto_takes_tcp_where_packets_get_through_one_way_only() -> None:
    fabric = FakeFabric()
    fabric.before = lambda pair, request: RETRIES if pair.number == max(fabric.pairs) else ""
    async with rig(fabric, auto=True) as link:
        assert link.far.fallback_reason == f"127.0.0.1 cannot be reached by RDMA: {RETRIES}"
        await _works(link)


async def test_auto_takes_tcp_where_nothing_answers_by_rdma() -> None:
    fabric = FakeFabric()
    fabric.held = True
    short = options("a", 1, handshake_timeout=2.0)
    async with rig(fabric, near=short, auto=True) as link:
        assert link.near.fallback_reason == "127.0.0.1 did not answer by RDMA within 0.5 s"
        await _works(link)


async def test_auto_takes_tcp_where_a_limit_of_the_device_is_reached() -> None:
    fabric = FakeFabric()
    fabric.max_depth = 16
    async with rig(fabric, auto=True) as link:
        assert "cannot make a queue pair" in link.near.fallback_reason
        await _works(link)


async def test_a_gid_that_cannot_be_connected_to_is_not_tried_again_soon() -> None:
    fabric, now = FakeFabric(), [100.0]
    fabric.unreachable.add(gid_of("127.0.0.1"))
    listening = AutoTransport(lambda: FakeVerbs(fabric))
    listening._negotiator._dead_ends = DeadEnds(lambda: now[0])
    why = "127.0.0.1 cannot be reached from fake0: cannot connect a queue pair: Connection timed out"
    async with rig(fabric, auto=True, listening=listening) as link:
        assert link.far.fallback_reason == why
        assert link.near.fallback_reason == f"the other end declined: {why}"
        await _works(link)
    assert fabric.connecting == 1
    fabric.unreachable.clear()
    now[0] += PERIOD - 0.1
    async with rig(fabric, auto=True, listening=listening) as link:
        assert link.far.fallback_reason == f"{why}; that is not tried again within 5 s"
        await _works(link)
    assert fabric.connecting == 1
    now[0] += 0.1
    async with rig(fabric, auto=True, listening=listening) as link:
        assert link.near.data_path.startswith("rdma fake0")
        await _works(link)


def test_so_many_gids_are_remembered_and_no_more() -> None:
    dead_ends = DeadEnds(lambda: 0.0)
    local = choose([device_info("fake0", "127.0.0.1")], RdmaOptions(), "127.0.0.1")
    for number in range(1025):
        dead_ends.remember(local, number.to_bytes(16, "big"), f"why {number}")
    assert dead_ends.why(local, bytes(16)) == ""
    assert [dead_ends.why(local, number.to_bytes(16, "big")) for number in (1, 1024)] == ["why 1", "why 1024"]
    assert dead_ends.why(replace(local, device="fake1"), (1).to_bytes(16, "big")) == ""


async def test_a_pair_that_cannot_be_connected_for_another_reason_may_be_tried_at_once() -> None:
    fabric = FakeFabric()
    fabric.unreachable.add(gid_of("127.0.0.1"))
    fabric.unreachable_errno = errno.ENOMEM
    listening = AutoTransport(lambda: FakeVerbs(fabric))
    async with rig(fabric, auto=True, listening=listening) as link:
        assert link.far.fallback_reason == "cannot connect a queue pair: Cannot allocate memory"
    fabric.unreachable.clear()
    async with rig(fabric, auto=True, listening=listening) as link:
        assert link.near.data_path.startswith("rdma fake0")
        await _works(link)


async def test_what_the_options_say_reaches_the_queue_pairs_of_each_end() -> None:
    near = RdmaOptions(
        depth=32, traffic_class=104, service_level=3, hop_limit=9, timeout=11, retry_count=5, rnr_retry=4
    )
    async with rig(near=options("a", 1, rdma=near), far=options("b", 2, rdma=RdmaOptions(depth=16))) as link:
        for pair, wanted in ((link.near_pairs[0], near), (link.far_pairs[0], RdmaOptions(depth=16))):
            path = pair.path
            assert path is not None
            found = (path.traffic_class, path.service_level, path.hop_limit)
            assert found == (wanted.traffic_class, wanted.service_level, wanted.hop_limit)
            found = (path.timeout, path.retry_count, path.rnr_retry)
            assert found == (wanted.timeout, wanted.retry_count, wanted.rnr_retry)
        near_path, far_path = link.near_pairs[0].path, link.far_pairs[0].path
        assert near_path is not None
        assert far_path is not None
        assert (near_path.remote_pair, far_path.remote_pair) == (link.far_pairs[0].number, link.near_pairs[0].number)
        assert (near_path.local_psn, near_path.remote_psn) == (far_path.remote_psn, far_path.local_psn)


async def test_the_lower_mtu_is_used_and_proved() -> None:
    fabric = FakeFabric(device_info("fake0", "127.0.0.1", mtu=4096), device_info("fake1", "127.0.0.1", mtu=1024))
    probes: list[int] = []

    def before(pair: FakePair, request: SendRequest) -> str:
        probes.append(request.length)
        return ""

    fabric.before = before
    far = FakeVerbs(fabric, "fake1")
    async with rig(fabric, near_verbs=lambda: FakeVerbs(fabric, "fake0"), far_verbs=lambda: far) as link:
        assert link.near.data_path.endswith("MTU 1024")
        assert link.far.data_path.endswith("MTU 1024")
        assert probes == [1024, 1024]
        await _works(link)


@pytest.mark.parametrize("who", ["near", "far"])
async def test_an_mtu_that_the_other_end_lacks_refuses_the_link(who: str) -> None:
    fabric = FakeFabric(device_info("fake0", "127.0.0.1", mtu=4096), device_info("fake1", "127.0.0.1", mtu=1024))
    wanted = {who: options("a" if who == "near" else "b", 1 if who == "near" else 2, rdma=RdmaOptions(mtu=4096))}
    large, small = (lambda: FakeVerbs(fabric, "fake0")), (lambda: FakeVerbs(fabric, "fake1"))
    verbs = (large, small) if who == "near" else (small, large)
    with pytest.raises(AgentUnavailable, match=r"rdma\.mtu is 4096"):
        async with rig(fabric, near=wanted.get("near"), far=wanted.get("far"), near_verbs=verbs[0], far_verbs=verbs[1]):
            pass
    assert fabric.leaks() == {}


async def test_rdma_or_no_link() -> None:
    fabric = FakeFabric()
    with pytest.raises(AgentUnavailable, match=r"no RDMA link to rdma://127\.0\.0\.1:\d+: .*pyverbs is not") as caught:
        async with rig(fabric, near_verbs=_none):
            pass
    assert "auto" in caught.value.hint
    fabric.before = lambda pair, request: RETRIES
    with pytest.raises(AgentUnavailable, match="cannot be reached by RDMA"):
        async with rig(fabric):
            pass
    assert fabric.leaks() == {}


async def test_listening_by_rdma_needs_pyverbs_and_a_device() -> None:
    with pytest.raises(ConfigError, match="pyverbs is not installed"):
        async with rig(far_verbs=_none):
            pass
    fabric = FakeFabric()
    fabric.devices.clear()
    with pytest.raises(ConfigError, match="no RDMA device"):
        async with rig(fabric):
            pass


class _Encrypted(PlainStream):
    channel = Channel(b"binding", frozenset({"a", "b"}))


async def test_mutual_tls_forbids_data_in_plain_text_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainStream, "channel", _Encrypted.channel)
    async with rig(auto=True) as link:
        assert "rdma_plaintext" in link.near.fallback_reason
        await _works(link)
    allowed = RdmaOptions(depth=32, plaintext=True)
    async with rig(auto=True, near=options("a", 1, rdma=allowed), far=options("b", 2, rdma=allowed)) as link:
        assert link.near.data_path.startswith("rdma ")
        await _works(link)
    async with rig(auto=True, near=options("a", 1, rdma=allowed)) as link:
        assert link.near.fallback_reason.startswith("the other end declined: mutual TLS")
    with pytest.raises(AgentUnavailable, match="mutual TLS protects this link, and data by RDMA is plain text"):
        async with rig():
            pass


# Transports of other kinds


async def _close(*ends: tuple[Link, Recorder]) -> None:
    for link, events in ends:
        link.abort(AgentUnavailable("the test is over"))
        await events.until_closed()


async def test_a_dialler_that_knows_tcp_only_is_taken_by_auto_and_refused_by_rdma() -> None:
    fabric = FakeFabric()
    queue: asyncio.Queue[tuple[Link, Recorder]] = asyncio.Queue()

    def accepted(link: Link) -> LinkEvents:
        queue.put_nowait((link, recorder := Recorder()))
        return recorder

    auto = await AutoTransport(lambda: FakeVerbs(fabric)).listen("auto://127.0.0.1:0", accepted, options("b", 2))
    events = Recorder()
    address = f"tcp://{auto.address.partition('://')[2]}"
    link = await TcpTransport().connect(address, events, options("a", 1))
    far, far_events = await queue.get()
    assert (far.data_path, far.fallback_reason) == ("", "the other end uses TCP only")
    await _close((link, events), (far, far_events))
    await auto.close()

    strict = await RdmaTransport(lambda: FakeVerbs(fabric)).listen("rdma://127.0.0.1:0", accepted, options("b", 2))
    events = Recorder()
    address = f"tcp://{strict.address.partition('://')[2]}"
    link = await TcpTransport().connect(address, events, options("a", 1))
    await events.until_closed()
    assert isinstance(events.ends[0], AgentUnavailable)
    assert queue.empty()
    await strict.close()


def _refuse(link: Link) -> LinkEvents:
    raise AssertionError


async def test_a_listener_that_knows_tcp_only_says_so() -> None:
    fabric = FakeFabric()
    queue: asyncio.Queue[tuple[Link, Recorder]] = asyncio.Queue()

    def accepted(link: Link) -> LinkEvents:
        queue.put_nowait((link, recorder := Recorder()))
        return recorder

    listener = await TcpTransport().listen("tcp://127.0.0.1:0", accepted, options("b", 2))
    host_port = listener.address.partition("://")[2]
    events = Recorder()
    link = await AutoTransport(lambda: FakeVerbs(fabric)).connect(f"auto://{host_port}", events, options("a", 1))
    assert link.fallback_reason == "the other end declined: the other end uses TCP only"
    await _close((link, events), await queue.get())
    with pytest.raises(AgentUnavailable, match="uses TCP only"):
        await RdmaTransport(lambda: FakeVerbs(fabric)).connect(f"rdma://{host_port}", Recorder(), options("a", 1))
    assert queue.empty()
    assert fabric.leaks() == {}
    await listener.close()


async def test_a_listener_of_an_earlier_version_is_dialled_again_by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_for_data_flows(listener: TcpListener, conversation: object, assembly: _Assembly) -> bool:
        await assembly.complete
        return False

    monkeypatch.setattr(TcpListener, "_asks", wait_for_data_flows)
    fabric = FakeFabric()
    queue: asyncio.Queue[tuple[Link, Recorder]] = asyncio.Queue()

    def accepted(link: Link) -> LinkEvents:
        queue.put_nowait((link, recorder := Recorder()))
        return recorder

    listener = await TcpTransport().listen("tcp://127.0.0.1:0", accepted, options("b", 2))
    host_port = listener.address.partition("://")[2]
    events = Recorder()
    short = _dialler(handshake_timeout=1.2)
    link = await AutoTransport(lambda: FakeVerbs(fabric)).connect(f"auto://{host_port}", events, short)
    assert link.fallback_reason == "the other end did not answer the offer of RDMA"
    await _close((link, events), await queue.get())
    with pytest.raises(AgentUnavailable, match="no answer in time"):
        await RdmaTransport(lambda: FakeVerbs(fabric)).connect(f"rdma://{host_port}", Recorder(), short)
    assert queue.empty()
    assert fabric.leaks() == {}
    await listener.close()


# Bad messages


def _dialler(**changes: object) -> LinkOptions:
    return options("a", 1, **changes)


async def _say(address: str, *messages: bytes) -> bytes:
    """Dial, send messages, each after the answer to the one before, and return the last answer."""
    async with streams_of_a_link() as streams:
        opened = await open_control(address, _dialler(), streams, "auto")
        conversation = Conversation(opened.stream)
        answer = b""
        for message in messages:
            await conversation.send(message)
            answer = await conversation.receive()
        opened.stream.close(reset=False)
    return answer


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff" * 100,
        negotiation.offer(SIDE)[:-1],
        negotiation.answer(SIDE, 1),
        negotiation.offer(SIDE),  # two queue pairs, where the handshake promised one
        bytes([negotiation.CONNECTED]),
    ],
)
async def test_garbage_from_a_dialler_ends_its_connection_only(message: bytes) -> None:
    fabric = FakeFabric()
    listener = await AutoTransport(lambda: FakeVerbs(fabric)).listen("auto://127.0.0.1:0", _refuse, options("b", 2))
    try:
        with pytest.raises(ConnectionError):
            await _say(listener.address, message)
    finally:
        await listener.close()
    assert fabric.leaks() == {}


@pytest.mark.parametrize("then", [b"\7", negotiation.offer(SIDE)])
async def test_garbage_after_the_offer_ends_the_connection_only(then: bytes) -> None:
    fabric = FakeFabric()
    one = Side("ethernet", "roce_v2", bytes(10) + b"\xff\xff\x7f\0\0\1", 0, 4096, 32, 8192, 7, (PairEnd(99, 5),))
    listener = await AutoTransport(lambda: FakeVerbs(fabric)).listen("auto://127.0.0.1:0", _refuse, options("b", 2))
    try:
        with pytest.raises(ConnectionError):
            await _say(listener.address, negotiation.offer(one), then)
    finally:
        await listener.close()
    assert fabric.leaks() == {}


async def test_a_version_that_is_not_known_goes_by_tcp() -> None:
    offer = bytearray(negotiation.offer(SIDE))
    offer[1:5] = struct.pack("<HH", 7, 9)
    listener = await AutoTransport(lambda: FakeVerbs(FakeFabric())).listen(
        "auto://127.0.0.1:0", _refuse, options("b", 2)
    )
    answer = await _say(listener.address, bytes(offer))
    assert declined(answer) == "the other end speaks RDMA negotiations 7 to 9"
    await listener.close()


async def test_garbage_from_a_listener_is_an_error_of_the_dialler() -> None:
    fabric = FakeFabric()
    authenticator = SecretAuthenticator("b", 2, SECRET)
    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handshake = authenticator.answer()
        while not handshake.finished:
            writer.write(handshake.receive(await reader.read(512)))
        header = await reader.readexactly(8)
        await reader.readexactly(struct.unpack_from("<I", header, 4)[0])
        writer.write(header[:4] + struct.pack("<I", 3) + b"\x02xy")
        await reader.read()
        writer.close()
        served.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ProtocolError, match=rf"auto://127.0.0.1:{port}: a message of 3 bytes in an RDMA negotiation"):
        await AutoTransport(lambda: FakeVerbs(fabric)).connect(f"auto://127.0.0.1:{port}", Recorder(), _dialler())
    server.close()
    await server.wait_closed()
    await served.wait()
    assert fabric.leaks() == {}
