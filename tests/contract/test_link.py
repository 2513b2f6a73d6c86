"""Who is at the other end, control frames, and how a link ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.contract.conftest import BOUND, Endpoint, Recorder, pattern

from allreduced.core.errors import (
    AgentUnavailable,
    AllReducedError,
    AuthenticationError,
    ConfigError,
    InternalError,
    LimitExceeded,
)
from allreduced.core.identity import PeerIdentity
from allreduced.protocol.handshake import HIGHEST_VERSION, ConnectedToSelf, SecretAuthenticator
from allreduced.transports.base import MAX_CONTROL, Link, LinkEvents, LinkOptions, LinkStats, is_refusal


async def test_both_ends_know_each_other(endpoint: Endpoint) -> None:
    async with endpoint.pair() as pair:
        assert pair.near.peer == PeerIdentity("b", 2)
        assert pair.far.peer == PeerIdentity("a", 1)
        assert pair.near.version == pair.far.version == HIGHEST_VERSION
        assert (pair.near.initiator, pair.far.initiator) == (True, False)
        assert pair.near.remote_address == pair.far.local_address == pair.listener.address
        assert pair.far.remote_address == pair.near.local_address != pair.listener.address
        assert pair.near.stats == pair.far.stats == LinkStats()


async def test_control_frames_arrive_in_order_as_they_were(endpoint: Endpoint) -> None:
    small = [bytes([k % 251]) * ((k * 37) % 1500) for k in range(600)]
    big = [bytes(pattern(MAX_CONTROL, k)) for k in range(3)]
    frames = [*small, *big, *small]
    async with endpoint.pair() as pair:
        for frame in frames:
            pair.near.send_control(frame)
            pair.far.send_control(frame[::-1])
        assert pair.near_events.count() == pair.far_events.count() == 0
        await pair.far_events.until(lambda: len(pair.far_events.control) == 1203)
        await pair.near_events.until(lambda: len(pair.near_events.control) == 1203)
        assert pair.far_events.control == frames
        assert pair.near_events.control == [frame[::-1] for frame in frames]
        assert pair.near.stats.control_sent == pair.near.stats.control_received == 1203


async def test_control_frames_that_are_too_long_are_refused(endpoint: Endpoint) -> None:
    async with endpoint.pair() as pair:
        with pytest.raises(ValueError, match=str(MAX_CONTROL)):
            pair.near.send_control(bytes(MAX_CONTROL + 1))
        pair.near.send_control(b"next")
        await pair.far_events.until_control([b"next"])


async def test_control_does_not_wait_behind_data(endpoint: Endpoint) -> None:
    size = 32 << 20
    async with endpoint.pair() as pair:
        token = pair.far.post_receive(1, memoryview(bytearray(size)))
        pair.near.send(1, token, 0, memoryview(bytes(size)))
        pair.near.send_control(b"now")
        await pair.far_events.until_bytes(1, size)
        assert pair.far_events.order.index("control") < len(pair.far_events.order) - 1


async def test_any_byte_is_a_sign_of_life(endpoint: Endpoint) -> None:
    async with endpoint.pair() as pair:
        began = asyncio.get_running_loop().time()
        pair.near.send_control(b"ping")
        await pair.far_events.until_control([b"ping"])
        after_control = pair.far.last_received
        pair.near.send(1, pair.far.post_receive(1, memoryview(bytearray(9))), 0, memoryview(bytes(9)))
        await pair.far_events.until_bytes(1, 9)
        assert began <= after_control <= pair.far.last_received <= asyncio.get_running_loop().time()


@pytest.mark.parametrize("who", ["near", "far"])
async def test_abort_ends_both_sides_once(endpoint: Endpoint, who: str) -> None:
    async with endpoint.pair() as pair:
        ends = [(pair.near, pair.near_events), (pair.far, pair.far_events)]
        (link, events), (_, other_events) = ends if who == "near" else ends[::-1]
        bulk = pair.far.post_receive(99, memoryview(bytearray(64 << 20)))
        for end, _ in ends:
            end.post_receive(1, memoryview(bytearray(10)))
            end.post_receive(2, memoryview(bytearray(10)))
            end.cancel_receive(2)
        pair.near.send(5, bulk, 0, memoryview(bytes(64 << 20)))
        reason = LimitExceeded("enough", limit="tests")
        link.abort(reason)
        link.abort(AgentUnavailable("again"))
        assert events.count() == 0
        await events.until_closed()
        await other_events.until_closed()
        assert events.ends == [reason]
        assert isinstance(other_events.ends[0], AgentUnavailable)
        assert sorted(pair.near_events.cancelled) == [1, 2]
        assert sorted(pair.far_events.cancelled) == [1, 2, 99]
        assert events.order[-1] == other_events.order[-1] == "closed"
        assert pair.near_events.sent_sends == [5]
        before = events.count(), other_events.count()
        for end, _ in ends:
            end.send_control(b"late")
            end.post_receive(7, memoryview(bytearray(4)))
            end.cancel_receive(7)
            end.send(8, bytes(8), 0, memoryview(b"late"))
            end.cancel_send(8)
            end.abort(reason)
            await end.close(BOUND)
        await asyncio.sleep(0)
        assert (events.count(), other_events.count()) == before


async def test_a_send_between_the_end_and_its_news_is_given_back(endpoint: Endpoint) -> None:
    async with endpoint.pair() as pair:
        pair.near.abort(AgentUnavailable("enough"))
        pair.near.send(3, bytes(8), 0, memoryview(b"data"))
        await pair.near_events.until_closed()
        assert pair.near_events.order == ["sent", "closed"]


async def test_close_sends_everything_first(endpoint: Endpoint) -> None:
    size = 12 << 20
    target = bytearray(size)
    async with endpoint.pair(flows=3) as pair:
        pair.near.send(1, pair.far.post_receive(1, memoryview(target)), 0, memoryview(pattern(size, 1)))
        for k in range(300):
            pair.near.send_control(bytes([k % 256]) * 1000)
        pair.far.post_receive(2, memoryview(bytearray(10)))
        await pair.near.close(BOUND)
        assert target == pattern(size, 1)
        assert pair.far_events.control == [bytes([k % 256]) * 1000 for k in range(300)]
        assert pair.far_events.nbytes(1) == size
        await pair.far_events.until_closed()
        assert pair.near_events.ends == pair.far_events.ends == [None]
        assert pair.near_events.sent_sends == [1]
        assert pair.far_events.cancelled == [2]
        assert pair.far_events.order[-1] == pair.near_events.order[-1] == "closed"


async def test_both_sides_may_close_at_once(endpoint: Endpoint) -> None:
    size = 5 << 20
    targets = bytearray(size), bytearray(size)
    async with endpoint.pair() as pair:
        pair.near.send(1, pair.far.post_receive(1, memoryview(targets[0])), 0, memoryview(pattern(size, 1)))
        pair.far.send(1, pair.near.post_receive(1, memoryview(targets[1])), 0, memoryview(pattern(size, 2)))
        pair.near.send_control(b"bye")
        pair.far.send_control(b"bye")
        await asyncio.gather(pair.near.close(BOUND), pair.far.close(BOUND), pair.near.close(BOUND))
        assert pair.near_events.ends == pair.far_events.ends == [None]
        assert pair.near_events.control == pair.far_events.control == [b"bye"]
        assert targets == (pattern(size, 1), pattern(size, 2))


async def test_a_send_to_a_closing_link_is_given_back(endpoint: Endpoint) -> None:
    async with endpoint.pair() as pair:
        token = pair.far.post_receive(1, memoryview(bytearray(4)))
        closing = asyncio.ensure_future(pair.near.close(BOUND))
        await asyncio.sleep(0)
        pair.near.send(1, token, 0, memoryview(b"late"))
        pair.near.send_control(b"late")
        await closing
        assert pair.near_events.order == ["sent", "closed"]
        await pair.far_events.until_closed()
        assert pair.far_events.order == ["receive_cancelled", "closed"]


async def test_a_defect_of_the_owner_ends_its_link(endpoint: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    async with endpoint.pair() as pair:

        def fail(link: Link, payload: bytes) -> None:
            raise KeyError("a defect")

        pair.far_events.on_control = fail
        pair.near.send_control(b"1")
        pair.near.send_control(b"2")
        await pair.far_events.until_closed()
        await pair.near_events.until_closed()
        assert isinstance(pair.far_events.ends[0], InternalError)
        assert pair.far_events.control == [b"1"]
        assert len([record for record in caplog.records if "link_owner_failed" in record.message]) == 1


@pytest.mark.parametrize("callback", ["on_control", "on_received", "on_sent", "on_cancelled"])
async def test_a_link_may_be_aborted_in_any_callback(endpoint: Endpoint, callback: str) -> None:
    async with endpoint.pair() as pair:

        def stop(link: Link, what: object) -> None:
            link.abort(AgentUnavailable("in a callback"))

        setattr(pair.far_events, callback, stop)
        token = pair.far.post_receive(1, memoryview(bytearray(100_000)))
        pair.far.post_receive(2, memoryview(bytearray(1)))
        pair.far.cancel_receive(2)
        pair.far.send(3, pair.near.post_receive(1, memoryview(bytearray(5))), 0, memoryview(b"hello"))
        pair.near.send_control(b"x")
        pair.near.send(1, token, 0, memoryview(bytes(100_000)))
        await pair.far_events.until_closed()
        await pair.near_events.until_closed()
        assert pair.far_events.order[-1] == "closed"
        assert isinstance(pair.far_events.ends[0], AgentUnavailable)


def _options(node: str, incarnation: int, secret: bytes = b"hush") -> LinkOptions:
    return LinkOptions(SecretAuthenticator(node, incarnation, secret), flows=2)


async def test_an_address_where_nobody_listens_refuses(endpoint: Endpoint) -> None:
    listener, _ = await endpoint.accept(_options("b", 2))
    await listener.close()
    with pytest.raises(AgentUnavailable) as caught:
        await endpoint.transport.connect(listener.address, Recorder(), _options("a", 1))
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    assert is_refusal(caught.value)


async def test_silence_is_no_refusal(endpoint: Endpoint) -> None:
    async with endpoint.mute(_options("b", 2)) as address:
        with pytest.raises(AgentUnavailable, match="no answer in time") as caught:
            await endpoint.transport.connect(address, Recorder(), replace(_options("a", 1), handshake_timeout=0.01))
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert not is_refusal(caught.value)


async def test_the_end_of_a_link_is_no_refusal(endpoint: Endpoint) -> None:
    async with endpoint.pair() as pair:
        pair.near.abort(AgentUnavailable("the test wants it"))
        await pair.far_events.until_closed()
        error = pair.far_events.ends[0]
        assert error is not None
        assert not is_refusal(error)


@pytest.mark.parametrize(
    ("mine", "theirs", "says"),
    [
        (b"right", b"wrong", "another secret"),
        (b"", b"secret", "this agent has none"),
        (b"secret", b"", "uses no secret"),
    ],
)
async def test_another_secret(endpoint: Endpoint, mine: bytes, theirs: bytes, says: str) -> None:
    listener, queue = await endpoint.accept(_options("b", 2, theirs))
    try:
        with pytest.raises(AuthenticationError, match=says) as caught:
            await endpoint.transport.connect(listener.address, Recorder(), _options("a", 1, mine))
        assert "ALLREDUCED_SECRET" in caught.value.hint
        assert queue.empty()
    finally:
        await listener.close()


async def test_an_agent_does_not_connect_to_itself(endpoint: Endpoint) -> None:
    options = _options("a", 1)
    listener, queue = await endpoint.accept(options)
    try:
        with pytest.raises(ConnectedToSelf):
            await endpoint.transport.connect(listener.address, Recorder(), options)
        assert queue.empty()
    finally:
        await listener.close()


async def test_an_owner_may_refuse_a_link(endpoint: Endpoint) -> None:
    def refuse(link: Link) -> LinkEvents:
        raise LimitExceeded("no more", limit="tests")

    listener = await endpoint.transport.listen(endpoint.address, refuse, _options("b", 2))
    try:
        events = Recorder()
        await endpoint.transport.connect(listener.address, events, _options("a", 1))
        await events.until_closed()
        assert isinstance(events.ends[0], AgentUnavailable)
    finally:
        await listener.close()


async def test_an_owner_may_speak_while_it_accepts(endpoint: Endpoint) -> None:
    links: list[Link] = []
    far_events, near_events = Recorder(), Recorder()

    def greet(link: Link) -> LinkEvents:
        links.append(link)
        link.send_control(b"welcome")
        return far_events

    listener = await endpoint.transport.listen(endpoint.address, greet, _options("b", 2))
    try:
        link = await endpoint.transport.connect(listener.address, near_events, _options("a", 1))
        await near_events.until_control([b"welcome"])
        await link.close(BOUND)
        await far_events.until_closed()
        assert far_events.ends == near_events.ends == [None]
        assert len(links) == 1
    finally:
        await listener.close()


async def test_an_address_is_taken_once(endpoint: Endpoint) -> None:
    listener, _ = await endpoint.accept(_options("b", 2))
    try:
        with pytest.raises(ConfigError, match="in use"):
            await replace(endpoint, address=listener.address).accept(_options("c", 3))
    finally:
        await listener.close()
        await listener.close()


async def test_malformed_addresses(endpoint: Endpoint) -> None:
    for address in (f"{endpoint.transport.scheme}://", "other://127.0.0.1:1", "127.0.0.1:1"):
        with pytest.raises(ConfigError):
            await replace(endpoint, address=address).accept(_options("b", 2))
        with pytest.raises(ConfigError):
            await endpoint.transport.connect(address, Recorder(), _options("a", 1))


async def test_links_outlive_their_listener(endpoint: Endpoint) -> None:
    async with endpoint.pair() as pair:
        await pair.listener.close()
        pair.near.send_control(b"still here")
        await pair.far_events.until_control([b"still here"])


async def test_one_listener_serves_many(endpoint: Endpoint) -> None:
    # All ends are made in one loop, which on emulated verbs takes a while.
    listener, queue = await endpoint.accept(replace(_options("b", 2), handshake_timeout=BOUND))
    dialled = [replace(_options(f"a{k}", 100 + k), handshake_timeout=BOUND) for k in range(8)]
    try:
        near = await asyncio.gather(
            *(endpoint.transport.connect(listener.address, Recorder(), options) for options in dialled)
        )
        far = [await queue.get() for _ in near]
        for link in near:
            link.send_control(b"from " + link.local_address.encode())
        for link, events in far:
            await events.until_control([b"from " + link.remote_address.encode()])
        assert sorted(link.peer.node for link, _ in far) == [f"a{k}" for k in range(8)]
        await asyncio.gather(*(link.close(BOUND) for link in near))
        ends: list[AllReducedError | None] = []
        for _, events in far:
            await events.until_closed()
            ends += events.ends
        assert ends == [None] * 8
    finally:
        await listener.close()
