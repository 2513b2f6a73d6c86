"""Frames between agents: bytes of version 1, which later versions must read and write, and the header."""

from __future__ import annotations

import pytest
from tests.support.reports import REPORT

from allreduced.core.errors import InternalError, ProtocolError, WireError
from allreduced.core.identity import GroupKey, Member
from allreduced.protocol import change, peer
from allreduced.protocol.peer import HEADER, Frame, decode, encode

ERROR: WireError = ("rank_lost", "rank 2 is gone", "see its log", {"ranks": [2], "nodes": ["b"]})
KEY = GroupKey(1000, "job-1", "world")

LOSS = change.Loss("b", (2, 3), True, False, ERROR)
CHANGE = change.Change(
    2,
    (Member("a", 11, (0, 1)),),
    (LOSS,),
    True,
    (5,),
    (change.Result("w", 2, (0, 1)),),
    (change.Failure("x", 0, ERROR),),
    4,
    (0, 7),
)

# Recorded once. A change here breaks every agent of version 1.
VERSION_1: list[tuple[Frame, str]] = [
    (peer.Heartbeat(), ("41524431010100000000000000000000000000000100000090")),
    (peer.Goodbye("SIGTERM"), ("41524431010200000000000000000000000000000900000091a75349475445524d")),
    (
        peer.PeerTable((("node-a", "tcp://10.0.0.1:4123"), ("node-b", "tcp://[::1]:4123")), 5.0),
        (
            "415244310103000000000000000000000000000040000000929292a66e6f64652d61b37463703a2f2f31302e302e302e313a3431323392a66e6f64652d62b07463703a2f2f5b3a3a315d3a34313233cb4014000000000000"
        ),
    ),
    (peer.StatusRequest(5, 1000), ("4152443101040000000000000000000000000000060000009305cd03e800")),
    (
        peer.Status(5, REPORT),
        (
            "41524431010500000000000000000000000000002c01000092059ea1610b2acd03e8cb4059000000000000039196a1620cb37463703a2f2f31302e302e302e323a34313233cb3fd0000000000000a3746370a0919d0793cd03e8a56a6f622d31a5776f726c64a772756e6e696e6701049293a1610b92000193a1620c92020392930064a772756e6e696e67930165a773746f7070656490a0a0919aa17702a9676174686572696e67cb4029000000000000cb4071f800000000009198aa616c6c5f7265647563650101a628332c2034290cffa0920001929200cb40290000000000009201cb4028000000000000920203a572616e6b7391a1629195a17800a86d69736d61746368ac72616e6b7320646966666572910100919493cd03e8a56a6f622d32a5776f726c6402919400a16166cb3ff8000000000000909192cd03e90200a0a090"
        ),
    ),
    (peer.Load(8, b"abc"), ("4152443101060000000000000000000000000000070000009208c403616263")),
    (peer.Loaded(8), ("4152443101070000000000000000000000000000020000009108")),
    (
        peer.Announce(KEY, 6, 3, 77, 4242, 1, bytes(range(32))),
        (
            "41524431011000000000000000000000000000003a0000009793cd03e8a56a6f622d31a5776f726c6406034dcd109201c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        ),
    ),
    (
        peer.Retract(KEY, 77, bytes(range(32))),
        (
            "4152443101110000000000000000000000000000340000009393cd03e8a56a6f622d31a5776f726c644dc420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        ),
    ),
    (
        peer.Refuse(KEY, 77, ERROR, bytes(range(32))),
        (
            "41524431011200000000000000000000000000006c0000009493cd03e8a56a6f622d31a5776f726c644d94a972616e6b5f6c6f7374ae72616e6b203220697320676f6e65ab73656520697473206c6f6782a572616e6b739102a56e6f64657391a162c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        ),
    ),
    (
        peer.Form(
            KEY,
            7,
            1,
            1 << 20,
            (Member("node-a", 11, (0, 1)), Member("node-b", 12, (2,))),
            (77, 78, 79),
            bytes(range(32)),
        ),
        (
            "4152443101130000010000000700000000000000540000009593cd03e8a56a6f622d31a5776f726c64ce001000009293a66e6f64652d610b92000193a66e6f64652d620c9102934d4e4fc420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        ),
    ),
    (
        peer.Broken(7, 1, ERROR),
        (
            "4152443101140000010000000700000000000000390000009194a972616e6b5f6c6f7374ae72616e6b203220697320676f6e65ab73656520697473206c6f6782a572616e6b739102a56e6f64657391a162"
        ),
    ),
    (peer.Left(7, 1, (0, 65535)), ("415244310115000001000000070000000000000006000000919200cdffff")),
    (
        change.Trouble(7, 1, (LOSS,)),
        (
            "415244310118000001000000070000000000000042000000919195a162920203c3c294a972616e6b5f6c6f7374ae72616e6b203220697320676f6e65ab73656520697473206c6f6782a572616e6b739102a56e6f64657391a162"
        ),
    ),
    (change.Prepare(7, 1, 3, 2), ("415244310119000001000000070000000000000003000000920302")),
    (
        change.Promise(
            7,
            1,
            3,
            2,
            1,
            0,
            (CHANGE,),
            (LOSS,),
            (5,),
            (change.Result("w", 2, (1,)),),
            (change.Failure("x", 0, ERROR),),
            4,
            (0,),
        ),
        (
            "41524431011a0000010000000700000000000000270100009b030201009199029193a1610b9200019195a162920203c3c294a972616e6b5f6c6f7374ae72616e6b203220697320676f6e65ab73656520697473206c6f6782a572616e6b739102a56e6f64657391a162c391059193a177029200019193a1780094a972616e6b5f6c6f7374ae72616e6b203220697320676f6e65ab73656520697473206c6f6782a572616e6b739102a56e6f64657391a162049200079195a162920203c3c294a972616e6b5f6c6f7374ae72616e6b203220697320676f6e65ab73656520697473206c6f6782a572616e6b739102a56e6f64657391a16291059193a1770291019193a1780094a972616e6b5f6c6f7374ae72616e6b203220697320676f6e65ab73656520697473206c6f6782a572616e6b739102a56e6f64657391a162049100"
        ),
    ),
    (
        change.Accept(7, 1, 3, 2, CHANGE),
        (
            "41524431011b00000100000007000000000000009a00000093030299029193a1610b9200019195a162920203c3c294a972616e6b5f6c6f7374ae72616e6b203220697320676f6e65ab73656520697473206c6f6782a572616e6b739102a56e6f64657391a162c391059193a177029200019193a1780094a972616e6b5f6c6f7374ae72616e6b203220697320676f6e65ab73656520697473206c6f6782a572616e6b739102a56e6f64657391a16204920007"
        ),
    ),
    (change.Accepted(7, 1, 3, 2), ("41524431011c000001000000070000000000000003000000920302")),
    (
        change.Committed(7, 1, CHANGE),
        (
            "41524431011d0000010000000700000000000000980000009199029193a1610b9200019195a162920203c3c294a972616e6b5f6c6f7374ae72616e6b203220697320676f6e65ab73656520697473206c6f6782a572616e6b739102a56e6f64657391a162c391059193a177029200019193a1780094a972616e6b5f6c6f7374ae72616e6b203220697320676f6e65ab73656520697473206c6f6782a572616e6b739102a56e6f64657391a16204920007"
        ),
    ),
    (
        peer.Ready(
            7,
            1,
            "layer1.w",
            2,
            0,
            peer.Fingerprint("all_reduce", 1, 1, "(2, 3)", 6, -1, ""),
            (-1, 9, 0),
            (peer.Grant(1, 0, 1, 0, 4, b"\x01\x02"), peer.Grant(2, 1, 0, 4, 1, b"")),
            300,
            (5, 6),
        ),
        (
            "41524431012000000100000007000000000000004100000098a86c61796572312e77020097aa616c6c5f7265647563650101a628322c20332906ffa093ff090092960100010004c4020102960201000401c400cd012c920506"
        ),
    ),
    (
        peer.MoreGrants(7, 1, "", 2, 1, (peer.Grant(3, 0, 1, 5, 1, b"\x03"),)),
        ("41524431012100000100000007000000000000000e00000094a0020191960300010501c40103"),
    ),
    (peer.Withdraw(7, 1, "w", 2, 1), ("41524431012200000100000007000000000000000500000093a1770201")),
    (peer.Withdrawn(7, 1, "w", 2, 1, True), ("41524431012300000100000007000000000000000600000094a1770201c3")),
    (peer.Queued(7, 1, "w", 2, (0, 9, 1)), ("41524431012400000100000007000000000000000800000093a1770293000901")),
    (peer.Arrived(7, 1, "w", 2, (0, 3)), ("41524431012500000100000007000000000000000700000093a17702920003")),
    (
        peer.Abort(0x1122334455667788, 0xFFFFFFFF, "w", 2, ERROR, False),
        (
            "4152443101260000ffffffff88776655443322113d00000094a1770294a972616e6b5f6c6f7374ae72616e6b203220697320676f6e65ab73656520697473206c6f6782a572616e6b739102a56e6f64657391a162c2"
        ),
    ),
    (
        peer.Differs(7, 1, "w", 2, (peer.Call(peer.Fingerprint("barrier", 3, 1, "", 0, -1, ""), (0, 3)),)),
        ("41524431012700000100000007000000000000001800000093a17702919297a7626172726965720301a000ffa0920003"),
    ),
    (peer.Kept(7, 1, "w", 2), ("41524431012800000100000007000000000000000400000092a17702")),
    (
        peer.Fetch(7, 2, "w", 2, (peer.Grant(3, 0, 0, 0, 1, b"\x03"),)),
        ("41524431012900000200000007000000000000000e00000093a1770291960300000001c40103"),
    ),
    (peer.Confirm(7, 1, (300, 301), True), ("41524431012a0000010000000700000000000000090000009292cd012ccd012dc3")),
    (
        peer.Forget(7, 1, 3, ("w", "x"), (1, 300)),
        ("41524431013000000100000007000000000000000c000000930392a177a1789201cd012c"),
    ),
    (peer.Forgettable(7, 1, 3, (0, 1023)), ("41524431013100000100000007000000000000000700000092039200cd03ff")),
]
recorded = pytest.mark.parametrize(("frame", "text"), VERSION_1, ids=[type(frame).__name__ for frame, _ in VERSION_1])


@recorded
def test_bytes_of_version_1_are_written(frame: Frame, text: str) -> None:
    assert encode(frame).hex() == text


@recorded
def test_bytes_of_version_1_are_read(frame: Frame, text: str) -> None:
    payload = bytes.fromhex(text)
    assert decode(payload) == frame
    assert decode(memoryview(payload)) == frame
    assert decode(bytearray(payload)) == frame


@recorded
def test_every_prefix_and_trailing_bytes_are_refused(frame: Frame, text: str) -> None:
    payload = bytes.fromhex(text)
    for cut in range(len(payload)):
        with pytest.raises(ProtocolError):
            decode(payload[:cut])
    with pytest.raises(ProtocolError, match=f"{type(frame).__name__}: the header tells"):
        decode(payload + b"\0")


def test_a_status_request_of_earlier_versions_asks_for_no_probe() -> None:
    frame = decode(bytes.fromhex("4152443101040000000000000000000000000000050000009205cd03e8"))
    assert frame == peer.StatusRequest(5, 1000, 0)


def test_a_table_of_earlier_versions_tells_no_timeout() -> None:
    frame = decode(bytes.fromhex("4152443101030000000000000000000000000000020000009190"))
    assert frame == peer.PeerTable((), 0.0)


def test_every_frame_is_recorded_and_has_a_code() -> None:
    frames = (
        peer.Frame,
        peer.MembershipFrame,
        peer.EngineFrame,
        peer.OperationFrame,
        peer.NamesFrame,
        peer.StatusFrame,
        peer.LoadFrame,
        change.ChangeFrame,
    )
    unions = " ".join(map(str, frames)).replace("|", " ").split()
    aliases = {
        "MembershipFrame",
        "EngineFrame",
        "OperationFrame",
        "NamesFrame",
        "ChangeFrame",
        "StatusFrame",
        "LoadFrame",
    }
    names = set(unions) - aliases
    assert {cls.__name__ for cls in peer.CODES} == {type(frame).__name__ for frame, _ in VERSION_1} == names
    assert len(set(peer.CODES.values())) == len(peer.CODES)
    assert all(0 < code < 256 for code in peer.CODES.values())


GOOD = {"magic": b"ARD1", "version": 1, "code": 21, "reserved": 0, "generation": 1, "group": 7, "length": 2}
BODY = b"\x91\x90"  # Left: no ranks


def test_the_header_is_24_bytes() -> None:
    assert HEADER.size == 24
    assert decode(HEADER.pack(*GOOD.values()) + BODY) == peer.Left(7, 1, ())


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("magic", b"ARD2", "a frame begins with b'ARD2', not with b'ARD1'"),
        ("version", 2, "a frame has version 2, this agent speaks 1"),
        ("code", 0, "frame type 0 is not known"),
        ("code", 255, "frame type 255 is not known"),
        ("code", 1, "Heartbeat: group and generation of the header must be 0, they are 7, 1"),
        ("reserved", 1, "Left: the reserved field of the header is 1"),
        ("length", 1, "Left: the header tells 1 bytes of body, there are 2"),
        ("length", 3, "Left: the header tells 3 bytes of body, there are 2"),
        ("length", 0xFFFFFFFF, "Left: the header tells 4294967295 bytes of body"),
    ],
)
def test_headers_are_checked(field: str, value: int | bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        decode(HEADER.pack(*{**GOOD, field: value}.values()) + BODY)


@pytest.mark.parametrize("payload", [b"", b"ARD1", bytes(24), b"GET / HTTP/1.1\r\nHost: agent\r\n\r\n", b"\xff" * 100])
def test_stray_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)


def test_frames_over_the_limit_are_neither_written_nor_read() -> None:
    member = Member("a", 1, tuple(range(1 << 16)))
    with pytest.raises(InternalError, match=f"Form has .* at most {peer.MAX_FRAME} can be sent"):
        encode(peer.Form(KEY, 7, 1, 1 << 20, (member,) * 6, ()))
    with pytest.raises(ProtocolError, match=f"24 to {peer.MAX_FRAME} are allowed"):
        decode(bytes(peer.MAX_FRAME + 1))


def test_the_largest_group_fits() -> None:
    size, nodes = 1 << 16, 1 << 12
    held = size // nodes
    members = tuple(
        Member(f"n{node}", (1 << 64) - 1, tuple(range(node * held, node * held + held))) for node in range(nodes)
    )
    frame = peer.Form(KEY, 7, 1, 1 << 20, members, ((1 << 64) - 1,) * size)
    assert decode(encode(frame)) == frame


EARLIER: list[tuple[peer.Frame, str]] = [
    (
        peer.Announce(KEY, 6, 3, 77, 4242, 1),
        ("4152443101100000000000000000000000000000180000009693cd03e8a56a6f622d31a5776f726c6406034dcd109201"),
    ),
    (
        peer.Retract(KEY, 77),
        ("4152443101110000000000000000000000000000120000009293cd03e8a56a6f622d31a5776f726c644d"),
    ),
    (
        peer.Refuse(KEY, 77, ERROR),
        (
            "41524431011200000000000000000000000000004a0000009393cd03e8a56a6f622d31a5776f726c644d94a972616e6b5f6c6f7374ae72616e6b203220697320676f6e65ab73656520697473206c6f6782a572616e6b739102a56e6f64657391a162"
        ),
    ),
    (
        peer.Form(KEY, 7, 1, 1 << 20, (Member("node-a", 11, (0, 1)), Member("node-b", 12, (2,))), (77, 78, 79)),
        (
            "4152443101130000010000000700000000000000320000009493cd03e8a56a6f622d31a5776f726c64ce001000009293a66e6f64652d610b92000193a66e6f64652d620c9102934d4e4f"
        ),
    ),
]
"""What agents told before there were job secrets."""


@pytest.mark.parametrize(("frame", "text"), EARLIER, ids=[type(frame).__name__ for frame, _ in EARLIER])
def test_frames_of_agents_without_job_secrets_are_read(frame: peer.Frame, text: str) -> None:
    assert peer.decode(bytes.fromhex(text)) == frame


@pytest.mark.parametrize(("frame", "text"), EARLIER, ids=[type(frame).__name__ for frame, _ in EARLIER])
def test_agents_without_job_secrets_read_the_frames_of_this_one(frame: peer.Frame, text: str) -> None:
    """They ignore the item behind those that they know."""
    body = bytes.fromhex(text)[peer.HEADER.size :]
    assert peer.encode(frame)[peer.HEADER.size :] == bytes([body[0] + 1]) + body[1:] + b"\xc4\x00"
