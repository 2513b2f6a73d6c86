"""Messages of client and agent: bytes of version 1, which later versions must read and write, and directions."""

from __future__ import annotations

import pytest
from tests.support.reports import REPORT

from allreduced.core.errors import InternalError, ProtocolError, WireError
from allreduced.protocol import local
from allreduced.protocol.local import ToAgent, ToClient, decode_to_agent, decode_to_client, encode
from allreduced.protocol.status import UnansweredReport

ERROR: WireError = ("rank_lost", "rank 2 is gone", "see its log", {"ranks": [2], "nodes": ["b"]})

# Recorded once. A change here breaks every client and agent of version 1.
VERSION_1: list[tuple[ToAgent | ToClient, str]] = [
    (local.Hello(1, 1, 4242, True), ("0800000095010101cd1092c3")),
    (
        local.Join(1, "job-1", "world", 3, 6, 1, 60.0, 300.0, bytes(range(32))),
        (
            "460000009a0201a56a6f622d31a5776f726c64030601cb404e000000000000cb4072c00000000000c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        ),
    ),
    (local.AllocateArena(2, 1 << 26), ("08000000930302ce04000000")),
    (local.ReleaseArena(5), ("03000000920405")),
    (
        local.Submit(
            3,
            0x1122334455667788,
            "all_reduce",
            "layer1.w",
            1,
            2,
            "(2, 3)",
            6,
            -1,
            0,
            0.0,
            "",
            b"\x00\x01\x02\x03",
            -1,
            0,
            False,
            False,
        ),
        (
            "42000000dc00120503cf1122334455667788aa616c6c5f726564756365a86c61796572312e770102a628322c20332906ff00cb0000000000000000a0c40400010203ff00c2c2"
        ),
    ),
    (
        local.Submit(
            (1 << 64) - 1, 7, "broadcast", "", 4, 0, "(5,)", 5, 3, -2, 1.5, "direct", None, 5, 1 << 40, True, True
        ),
        (
            "40000000dc001205cfffffffffffffffff07a962726f616463617374a00400a428352c290503fecb3ff8000000000000a6646972656374c005cf0000010000000000c3c3"
        ),
    ),
    (local.Upload(3, b"\xff\x00"), ("07000000930603c402ff00")),
    (local.ReleaseLeases((1, 300, 1 << 63)), ("1000000092079301cd012ccf8000000000000000")),
    (local.Leave(7), ("03000000920807")),
    (
        local.Welcome(1, "node-a", 0xFFEEDDCCBBAA9988, 8192, 300.0),
        ("1f000000964101a66e6f64652d61cfffeeddccbbaa9988cd2000cb4072c00000000000"),
    ),
    (
        local.Refused(("authentication", "not your agent", "", {})),
        ("23000000924294ae61757468656e7469636174696f6eae6e6f7420796f7572206167656e74a080"),
    ),
    (
        local.Joined(1, 7, 1, 3, 6, 1, (("node-a", (0, 1, 2)), ("node-b", (3, 4, 5))), 5.0),
        ("2a00000099430107010306019292a66e6f64652d619300010292a66e6f64652d6293030405cb4014000000000000"),
    ),
    (local.ArenaGranted(2, 5, 1 << 26), ("0900000094440205ce04000000")),
    (local.ResultArena(6, 7, 1 << 20), ("0900000094450607ce00100000")),
    (local.ResultArenaGone(6), ("03000000924606")),
    (
        local.Done(3, None, 6, 4096, 24, 9, False, (), "direct", 0.25),
        ("1c0000009b4703c006cd10001809c290a6646972656374cb3fd0000000000000"),
    ),
    (
        local.Done(4, b"\x01", -1, 0, 1, 0, True, (0, 2), "", 0.0),
        ("180000009b4704c40101ff000100c3920002a0cb0000000000000000"),
    ),
    (local.Download(4, b"\x02\x03", True), ("08000000944804c4020203c3")),
    (
        local.RequestFailed(3, ERROR),
        (
            "3b00000093490394a972616e6b5f6c6f7374ae72616e6b203220697320676f6e65ab73656520697473206c6f6782a572616e6b739102a56e6f64657391a162"
        ),
    ),
    (
        local.GroupEnded(7, ERROR),
        (
            "3b000000934a0794a972616e6b5f6c6f7374ae72616e6b203220697320676f6e65ab73656520697473206c6f6782a572616e6b739102a56e6f64657391a162"
        ),
    ),
    (local.AskStatus(9, True), ("05000000940909c300")),
    (
        local.AgentStatus(9, REPORT),
        (
            "2d010000934b099ea1610b2acd03e8cb4059000000000000039196a1620cb37463703a2f2f31302e302e302e323a34313233cb3fd0000000000000a3746370a0919d0793cd03e8a56a6f622d31a5776f726c64a772756e6e696e6701049293a1610b92000193a1620c92020392930064a772756e6e696e67930165a773746f7070656490a0a0919aa17702a9676174686572696e67cb4029000000000000cb4071f800000000009198aa616c6c5f7265647563650101a628332c2034290cffa0920001929200cb40290000000000009201cb4028000000000000920203a572616e6b7391a1629195a17800a86d69736d61746368ac72616e6b7320646966666572910100919493cd03e8a56a6f622d32a5776f726c6402919400a16166cb3ff8000000000000909192cd03e90200a0a090"
        ),
    ),
    (
        local.StatusEnd(9, (UnansweredReport("c", "there is no link to it"),)),
        ("1e000000934c099192a163b67468657265206973206e6f206c696e6b20746f206974"),
    ),
]
recorded = pytest.mark.parametrize(
    ("message", "text"), VERSION_1, ids=[f"{place}-{type(entry[0]).__name__}" for place, entry in enumerate(VERSION_1)]
)


@recorded
def test_bytes_of_version_1_are_written(message: ToAgent | ToClient, text: str) -> None:
    assert encode(message).hex() == text


@recorded
def test_bytes_of_version_1_are_read(message: ToAgent | ToClient, text: str) -> None:
    data = bytes.fromhex(text)
    assert int.from_bytes(data[:4], "little") == len(data) - 4
    decode = decode_to_agent if local.CODES[type(message)] < 64 else decode_to_client
    assert decode(data[4:]) == message
    assert decode(memoryview(data)[4:]) == message
    assert decode(bytearray(data[4:])) == message


@recorded
def test_messages_of_the_wrong_direction_are_refused(message: ToAgent | ToClient, text: str) -> None:
    body = bytes.fromhex(text)[4:]
    if local.CODES[type(message)] < 64:
        with pytest.raises(ProtocolError, match="goes from client to agent"):
            decode_to_client(body)
    else:
        with pytest.raises(ProtocolError, match="goes from agent to client"):
            decode_to_agent(body)


def test_every_message_is_recorded_and_has_a_code() -> None:
    known = {cls for cls in vars(local).values() if isinstance(cls, type) and cls.__module__ == local.__name__}
    assert set(local.CODES) == {type(message) for message, _ in VERSION_1} == known
    assert len(set(local.CODES.values())) == len(local.CODES)
    assert all(0 < code < 128 for code in local.CODES.values())


def test_directions_are_those_of_the_types() -> None:
    def names(union: str) -> set[str]:
        return set(union.replace("|", " ").split())

    assert names(f"{local.ToAgent}") == {cls.__name__ for cls, code in local.CODES.items() if code < 64}
    assert names(f"{local.ToClient}") == {cls.__name__ for cls, code in local.CODES.items() if code > 64}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "must be a msgpack array that begins with its type code"),
        (b"\x90", "must be a msgpack array that begins with its type code"),
        (b"\x80", "must be a msgpack array that begins with its type code"),
        (b"\xc0", "must be a msgpack array that begins with its type code"),
        (b"\x91\xcc\x05", "must be a msgpack array that begins with its type code"),
        (b"\xdc\x00\x12", "must be a msgpack array that begins with its type code"),
        (b"GET / HTTP/1.1\r\n", "must be a msgpack array that begins with its type code"),
        (b"\x91\x3f", "message type 63 is not known"),
        (b"\x91\x00", "message type 0 is not known"),
        (b"\x91\x40", "message type 64"),
    ],
)
def test_bodies_that_are_no_messages_are_refused(body: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        decode_to_agent(body)


def test_longer_forms_of_the_array_header_are_read() -> None:
    assert decode_to_agent(b"\xdd\x00\x00\x00\x02\x08\x07") == local.Leave(7)
    assert decode_to_agent(b"\xdc\x00\x02\x08\x07") == local.Leave(7)


def test_the_joined_of_earlier_versions_tells_no_failure_timeout() -> None:
    body = bytes.fromhex("98430107010306019292a66e6f64652d619300010292a66e6f64652d6293030405")
    nodes = (("node-a", (0, 1, 2)), ("node-b", (3, 4, 5)))
    assert local.decode_to_client(body) == local.Joined(1, 7, 1, 3, 6, 1, nodes, 0.0)


def test_the_join_of_earlier_versions_tells_no_secret() -> None:
    body = bytes.fromhex("990201a56a6f622d31a5776f726c64030601cb404e000000000000cb4072c00000000000")
    assert local.decode_to_agent(body) == local.Join(1, "job-1", "world", 3, 6, 1, 60.0, 300.0, b"")


def test_agents_of_earlier_versions_read_a_join_with_a_secret() -> None:
    """They ignore items behind those that they know; the client asks their version first."""
    body = encode(local.Join(1, "job-1", "world", 3, 6, 1, 60.0, 300.0, bytes(32)))[4:]
    assert body[1:].startswith(bytes.fromhex("0201a56a6f622d31a5776f726c64030601cb404e000000000000cb4072c00000000000"))
    assert body[0] == 0x9A


def test_the_ask_status_of_earlier_versions_asks_for_no_probe() -> None:
    assert decode_to_agent(bytes.fromhex("930909c3")) == local.AskStatus(9, True, 0)


def test_a_whole_chunk_fits() -> None:
    message = local.Upload((1 << 64) - 1, b"x" * local.CHUNK)
    assert decode_to_agent(encode(message)[4:]) == message


def test_messages_over_the_limit_are_neither_written_nor_read() -> None:
    everyone = tuple(range(1 << 16))
    joined = local.Joined(1, 7, 1, 0, 1 << 16, 0, (("a", everyone),) * 20)
    with pytest.raises(InternalError, match=f"Joined has .* at most {local.MAX_MESSAGE} can be sent"):
        encode(joined)
    with pytest.raises(ProtocolError, match=f"at most {local.MAX_MESSAGE} are allowed"):
        decode_to_agent(b"\x92\x08\x07" + bytes(local.MAX_MESSAGE))


def test_the_largest_group_fits() -> None:
    nodes = tuple((f"node-{node:05}.example.org", (node,)) for node in range(1 << 16))
    message = local.Joined(1, 7, 1, 0, 1 << 16, 0, nodes)
    assert decode_to_client(encode(message)[4:]) == message
