"""Every message and frame, by rules derived from the types of its fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allreduced.core.errors import InternalError, ProtocolError
from allreduced.core.limits import AtMost, Between, Id, Name, Rank, Seconds
from allreduced.protocol import local, peer, wire_error
from allreduced.protocol.codec import ADDED_LATER, MORE_FIELDS, Codec

QUICK = settings(derandomize=True, database=None, deadline=None, max_examples=25)


class Way(NamedTuple):
    """How one class is told and read, and how many items of its array come before the fields."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], object]
    head: int


def _way(cls: type) -> Way:
    if cls in peer.CODES:
        return Way(lambda message: peer.encode(message)[peer.HEADER.size :], lambda body: _peer(cls, body), 0)
    decode = local.decode_to_agent if local.CODES[cls] < 64 else local.decode_to_client
    return Way(lambda message: local.encode(message)[4:], decode, 1)


def _peer(cls: type, body: bytes) -> object:
    # 0 fits frames of every kind: those with a group may have this one too
    return peer.decode(peer.HEADER.pack(peer.MAGIC, 1, peer.CODES[cls], 0, 0, 0, len(body)) + body)


CLASSES = [*local.CODES, *peer.CODES]
all_classes = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


# What fields may hold


def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True, localns={"WireError": wire_error.Marker})


def _split(hint: Any) -> tuple[Any, Any]:
    return get_args(hint) if get_origin(hint) is Annotated else (hint, None)


def _numbers(limit: Between) -> st.SearchStrategy[int]:
    extremes = st.sampled_from([limit.lowest, limit.highest, max(limit.lowest, 0)])
    return extremes | st.integers(limit.lowest, limit.highest)


def _texts(most: int) -> st.SearchStrategy[str]:
    extremes = st.sampled_from(["", "x" * most, "€" * (most // 3), "a\0b\n"])
    return extremes | st.text(max_size=min(most // 4, 20))


FACTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | _texts(4096),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
).filter(lambda fact: _depth(fact) < wire_error.MAX_DEPTH)


def _depth(fact: object) -> int:
    if isinstance(fact, dict):
        fact = list(fact.values())
    return 1 + max(map(_depth, fact), default=0) if isinstance(fact, list) else 0


def _values(hint: Any, most: int = 4) -> st.SearchStrategy[Any]:
    """Return values of a field, with ``most`` items in arrays; fewer further inside, or they would be thousands."""
    hint, limit = _split(hint)
    if hint is wire_error.Marker:
        facts = st.dictionaries(_texts(256), FACTS, max_size=3)
        return st.tuples(_texts(64), _texts(4096), _texts(4096), facts)
    if hint is bool:
        return st.booleans()
    if hint is int:
        return _numbers(limit)
    if hint is float:
        return st.sampled_from([0.0, limit.highest, 5e-324]) | st.floats(0.0, limit.highest)
    if hint is str:
        return _texts(limit.length)
    if hint is bytes:
        return st.sampled_from([b"", b"\xff" * limit.length]) | st.binary(max_size=40)
    if type(None) in get_args(hint):
        return st.none() | _values(get_args(hint)[0], most)
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        if kinds[-1] is ...:
            return st.lists(_values(kinds[0], max(most // 2, 1)), max_size=min(most, limit.length)).map(tuple)
        return st.tuples(*(_values(kind, most) for kind in kinds))
    return messages(hint, most)


def messages(cls: type, most: int = 4) -> st.SearchStrategy[Any]:
    return st.builds(cls, *(_values(hint, most) for hint in _hints(cls).values()))


def least(hint: Any) -> Any:
    """Return the smallest value of a field or the smallest record of a class."""
    hint, limit = _split(hint)
    if hint is wire_error.Marker:
        return ("", "", "", {})
    if hint is int:
        return limit.lowest
    if hint in (bool, float, str, bytes):
        return hint()
    if type(None) in get_args(hint):
        return None
    if get_origin(hint) is tuple:
        return () if get_args(hint)[-1] is ... else tuple(map(least, get_args(hint)))
    return hint(*map(least, _hints(hint).values()))


def wrong(hint: Any) -> list[Any]:
    """Return values that the field must refuse, in the form that msgpack tells."""
    hint, limit = _split(hint)
    others: list[Any] = [{}, b"\0", "1", 1.5, -1.0, [[[]]], True, None, msgpack.ExtType(5, b""), float("nan")]
    if hint is wire_error.Marker:
        long = "x" * 4097
        deep: Any = {"a": {"a": {"a": {"a": {}}}}}
        bad = [["", "", ""], ["", "", "", []], ["", 1, "", {}], ["x" * 65, "", "", {}], ["", long, "", {}]]
        return [*others, *bad, ["", "", "", {"a": long}], ["", "", "", {"a" * 257: 1}], ["", "", "", deep], {}]
    if hint is bool:
        return [other for other in others if other is not True] + [0, 1]
    if hint is int:
        edges = [edge for edge in (limit.lowest - 1, limit.highest + 1) if -(1 << 63) <= edge < 1 << 64]
        return others + edges
    if hint is float:
        return [other for other in others if other != 1.5] + [-1, float("inf"), limit.highest * 1.01, 1 << 63]
    if hint is str:
        return [other for other in others if other != "1"] + [1, "x" * (limit.length + 1), "€" * (limit.length // 2)]
    if hint is bytes:
        return [other for other in others if other != b"\0"] + [1, b"x" * (limit.length + 1)]
    if type(None) in get_args(hint):
        return [other for other in wrong(get_args(hint)[0]) if other is not None]
    if get_origin(hint) is tuple and get_args(hint)[-1] is ...:
        tail = [[value] for value in wrong(get_args(hint)[0])]
        return [*others, *tail, [_plain(least(get_args(hint)[0]))] * (limit.length + 1)]
    return [*others, []]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return value


# The rules


@all_classes
def test_every_message_comes_back_as_it_was(cls: type) -> None:
    way = _way(cls)

    @QUICK
    @given(messages(cls))
    def check(message: Any) -> None:
        if cls in peer.CODES:
            assert peer.decode(peer.encode(message)) == message
        else:
            assert way.decode(way.encode(message)) == message

    check()


@all_classes
def test_wrong_values_are_refused_by_message_and_field(cls: type) -> None:
    way = _way(cls)
    array = msgpack.unpackb(way.encode(least(cls)))
    inside = {name: hint for name, hint in _hints(cls).items() if way.head or name not in ("group", "generation")}
    for place, (name, hint) in enumerate(inside.items(), start=way.head):
        for value in wrong(hint):
            body = msgpack.packb([*array[:place], value, *array[place + 1 :]])
            with pytest.raises(ProtocolError) as caught:
                way.decode(body)
            assert cls.__name__ in str(caught.value)
            if "not msgpack within the limits" not in str(caught.value):
                assert f"{cls.__name__}.{name}" in str(caught.value)


@all_classes
def test_refusals_show_neither_bytes_nor_what_came_for_them(cls: type) -> None:
    """Bytes are contents of tensors and proofs of secrets, and refusals get into logs."""
    way = _way(cls)
    array = msgpack.unpackb(way.encode(least(cls)))
    inside = {name: hint for name, hint in _hints(cls).items() if way.head or name not in ("group", "generation")}
    for place, hint in enumerate(inside.values(), start=way.head):
        kind = _split(hint)[0]
        of_bytes = bytes in (kind, *(_split(inner)[0] for inner in get_args(kind)))
        value = "private" if of_bytes else b"private"
        with pytest.raises(ProtocolError) as caught:
            way.decode(msgpack.packb([*array[:place], value, *array[place + 1 :]]))
        assert "private" not in str(caught.value)


@all_classes
def test_further_items_are_ignored_and_missing_ones_refused(cls: type) -> None:
    way = _way(cls)
    message = least(cls)
    array = msgpack.unpackb(way.encode(message))
    assert way.decode(msgpack.packb([*array, 1, "later", {"x": [b"y"]}])) == message
    later = [field.default for field in dataclasses.fields(cls) if field.metadata == ADDED_LATER]
    earliest = array[: len(array) - len(later)]
    told = {field.name: field.default for field in dataclasses.fields(cls)[len(dataclasses.fields(cls)) - len(later) :]}
    assert way.decode(msgpack.packb(earliest)) == dataclasses.replace(message, **told)
    if len(earliest) > way.head:
        with pytest.raises(ProtocolError, match=f"{cls.__name__} lacks the field"):
            way.decode(msgpack.packb(earliest[:-1]))


@all_classes
def test_every_prefix_and_every_suffix_is_refused(cls: type) -> None:
    way = _way(cls)
    body = way.encode(least(cls))
    for cut in range(len(body)):
        with pytest.raises(ProtocolError):
            way.decode(body[:cut])
    with pytest.raises(ProtocolError):
        way.decode(body + b"\0")


@QUICK
@given(data=st.data())
def test_changed_bytes_raise_nothing_but_protocol_errors(data: st.DataObject) -> None:
    cls = data.draw(st.sampled_from(CLASSES))
    way = _way(cls)
    body = bytearray(way.encode(data.draw(messages(cls))))
    for _ in range(data.draw(st.integers(1, 4))):
        if body:
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    _harmless(way, bytes(body))


@all_classes
def test_garbage_raises_nothing_but_protocol_errors(cls: type) -> None:
    way = _way(cls)
    head = way.encode(least(cls))[:2]
    for first in range(256):
        _harmless(way, head + bytes([first]) * 40)
        _harmless(way, bytes([first]) + bytes(range(100)))


def _harmless(way: Way, body: bytes) -> None:
    try:
        way.decode(body)
    except ProtocolError:
        return


@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
    id: Id
    names: Annotated[tuple[Name, ...], AtMost(3)]


@dataclasses.dataclass(frozen=True, slots=True)
class Outer:
    inner: Inner
    inners: Annotated[tuple[Inner, ...], AtMost(2)]
    pairs: Annotated[tuple[tuple[Name, Rank], ...], AtMost(2)]
    wait: Annotated[float, Seconds(10.0)]


OUTER = Codec(Outer, code=None)


def test_records_nest() -> None:
    message = Outer(Inner(1, ("a",)), (Inner(2, ()), Inner(3, ("b", "c"))), (("x", 0), ("y", 9)), 2.5)
    body = OUTER.pack(message)
    assert msgpack.unpackb(body) == [[1, ["a"]], [[2, []], [3, ["b", "c"]]], [["x", 0], ["y", 9]], 2.5]
    assert OUTER.unpack(body) == message
    assert OUTER.unpack(bytearray(body)) == OUTER.unpack(memoryview(body)) == message


@pytest.mark.parametrize(
    ("array", "text"),
    [
        ([[1, []], [[2, [7]]], [], 0.0], r"Outer\.inners\[\]\.names\[\] is 7, it must be text of at most 256 bytes"),
        ([[-1, []], [], [], 0.0], r"Outer\.inner\.id is -1, it must be an integer from 0 to 18446744073709551615"),
        ([[1, []], [], [["x", 65536]], 0.0], r"Outer\.pairs\[\]\[1\] is 65536"),
        ([[1, []], [], [["x"]], 0.0], r"Outer\.pairs\[\] is an array of 1, it must be an array of 2"),
        ([[1, []], [], [], 10.5], r"Outer\.wait is 10\.5, it must be a number from 0 to 10"),
        ([[1], [], [], 0.0], r"Outer\.inner lacks the field names: 1 items of 2"),
        ([5, [], [], 0.0], r"Outer\.inner is 5, it must be an array of 2 fields"),
        ([[1, []], [], [], "x" * 60], r"Outer\.wait is 'x{40}'… of length 60"),
        (7, r"Outer: the body is 7, it must be an array"),
    ],
)
def test_refusals_tell_where_and_what(array: object, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        OUTER.unpack(msgpack.packb(array))


def test_further_items_of_inner_records_are_ignored() -> None:
    assert OUTER.unpack(msgpack.packb([[1, [], "later"], [[2, [], 0]], [], 1.0])) == Outer(
        Inner(1, ()), (Inner(2, ()),), (), 1.0
    )


def test_a_body_of_too_many_items_is_refused() -> None:
    codec = Codec(peer.Withdraw, code=None)  # 5 fields
    with pytest.raises(ProtocolError, match=f"Withdraw has {6 + MORE_FIELDS} items, 5 are known"):
        codec.unpack(msgpack.packb([0] * (6 + MORE_FIELDS)))
    with pytest.raises(ProtocolError, match="not msgpack within the limits"):
        codec.unpack(msgpack.packb([0] * 2000))


def test_whole_numbers_are_taken_as_floats() -> None:
    message = OUTER.unpack(msgpack.packb([[1, []], [], [], 3]))
    assert message.wait == 3.0
    assert type(message.wait) is float


@pytest.mark.parametrize("body", [b"\xdd\x00\x00\xff\xff" * 1000, b"\x91" * 5000, b"\xdc\xff\xff" * 40000])
def test_arrays_that_only_claim_to_be_long_cost_nothing(body: bytes) -> None:
    codec = Codec(local.ReleaseLeases, code=7)
    with pytest.raises(ProtocolError, match="ReleaseLeases: the body is not msgpack within the limits"):
        codec.unpack(body)


def test_maps_are_refused_where_no_field_is_one() -> None:
    with pytest.raises(ProtocolError, match=r"Outer\.inner is a map, it must be an array of 2 fields"):
        OUTER.unpack(msgpack.packb([{"a": 2}, [], [], 0.0]))
    with pytest.raises(ProtocolError, match="not msgpack within the limits"):
        OUTER.unpack(msgpack.packb([[1, []], [], [], 0.0, {1: 2}]))


def test_a_field_without_a_limit_is_a_defect() -> None:
    unlimited = dataclasses.make_dataclass("Unlimited", [("number", int)], frozen=True, slots=True)
    with pytest.raises(TypeError, match=r"Unlimited\.number: there is no rule"):
        Codec(unlimited, code=None)


def test_a_value_that_cannot_be_told_is_a_defect() -> None:
    with pytest.raises(InternalError, match="Leave cannot be sent"):
        local.encode(local.Leave(1 << 64))
