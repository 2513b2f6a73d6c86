"""What the two ends of a link tell each other before data goes by RDMA, sans-IO.

The dialler sends an OFFER with everything of its end, the listener an ANSWER with the same of its own. Each connects
its queue pairs and proves with a message that they reach the other: first the dialler, which says CONNECTED, then the
listener, which says CONFIRMED. Instead of any of these either side may decline and say why.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from allreduced.core.errors import ProtocolError
from allreduced.transports.rdma.verbs_port import MTUS, GidKind, LinkLayer

LOWEST_VERSION: Final = 1
HIGHEST_VERSION: Final = 1

OFFER: Final = 1
ANSWER: Final = 2
CONNECTED: Final = 3
CONFIRMED: Final = 4

MIN_DEPTH: Final = 8
MIN_SMALL: Final = 256
MAX_SMALL: Final = 64 << 10

_HEAD = struct.Struct("<BHH")  # kind, lowest, highest (an answer: both are the version that is spoken)
_SIDE = struct.Struct("<BB16sHHHIQB")  # link layer, kind of gid, gid, lid, mtu, depth, small, tag, pairs
_PAIR = struct.Struct("<II")  # number, first packet

_LAYERS: Final[dict[int, LinkLayer]] = {1: "infiniband", 2: "ethernet"}
_KINDS: Final[dict[int, GidKind]] = {0: "ib", 1: "roce_v1", 2: "roce_v2"}
_KIND_NUMBERS: Final = {kind: number for number, kind in _KINDS.items()}
_LAYER_NUMBERS: Final = {layer: number for number, layer in _LAYERS.items()}


@dataclass(frozen=True, slots=True)
class PairEnd:
    """One end of a queue pair. ``psn``: the number of its first packet, 24 bits, random."""

    number: int
    psn: int


@dataclass(frozen=True, slots=True)
class Side:
    """What one end of a link tells the other."""

    link_layer: LinkLayer
    kind: GidKind
    gid: bytes
    lid: int
    mtu: int
    depth: int
    small: int
    tag: int
    pairs: tuple[PairEnd, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """The dialler's message."""

    lowest: int
    highest: int
    side: Side


@dataclass(frozen=True, slots=True)
class Answer:
    """The listener's message."""

    version: int
    side: Side


def offer(side: Side) -> bytes:
    """Return the dialler's message."""
    return _HEAD.pack(OFFER, LOWEST_VERSION, HIGHEST_VERSION) + _pack(side)


def answer(side: Side, version: int) -> bytes:
    """Return the listener's message."""
    return _HEAD.pack(ANSWER, version, version) + _pack(side)


def read_offer(data: bytes) -> Offer:
    """Return what :func:`offer` made.

    :raises ProtocolError: it is none, or something in it cannot be.
    """
    lowest, highest, side = _read(data, OFFER)
    return Offer(lowest, highest, side)


def read_answer(data: bytes) -> Answer:
    """Return what :func:`answer` made.

    :raises ProtocolError: it is none, something in it cannot be, or it is of a version that was not offered.
    """
    lowest, highest, side = _read(data, ANSWER)
    if lowest != highest or not LOWEST_VERSION <= highest <= HIGHEST_VERSION:
        raise ProtocolError(f"an answer of version {lowest} to {highest} of the RDMA negotiation")
    return Answer(highest, side)


def common_version(offered: Offer) -> int | None:
    """Return the version that both ends speak, or None."""
    version = min(HIGHEST_VERSION, offered.highest)
    return version if version >= max(LOWEST_VERSION, offered.lowest) else None


def _pack(side: Side) -> bytes:
    head = _SIDE.pack(
        _LAYER_NUMBERS.get(side.link_layer, 0),
        _KIND_NUMBERS[side.kind],
        side.gid,
        side.lid,
        side.mtu,
        side.depth,
        side.small,
        side.tag,
        len(side.pairs),
    )
    return head + b"".join(_PAIR.pack(pair.number, pair.psn) for pair in side.pairs)


def _read(data: bytes, expected: int) -> tuple[int, int, Side]:
    if len(data) < _HEAD.size + _SIDE.size:
        raise ProtocolError(f"a message of {len(data)} bytes in an RDMA negotiation, which is too short")
    kind, lowest, highest = _HEAD.unpack_from(data)
    if kind != expected or lowest > highest:
        raise ProtocolError(f"a message of kind {kind} in an RDMA negotiation, where {expected} was expected")
    number, gid_kind, gid, lid, mtu, depth, small, tag, count = _SIDE.unpack_from(data, _HEAD.size)
    pairs = data[_HEAD.size + _SIDE.size :]
    if len(pairs) != count * _PAIR.size:
        raise ProtocolError(f"{len(pairs)} bytes for {count} queue pairs in an RDMA negotiation")
    layer, kind_of_gid = _LAYERS.get(number), _KINDS.get(gid_kind)
    if (
        layer is None
        or kind_of_gid is None
        or mtu not in MTUS
        or depth < MIN_DEPTH
        or not MIN_SMALL <= small <= MAX_SMALL
        or not tag
    ):
        raise ProtocolError(
            f"an RDMA end that cannot be: link layer {number}, mtu {mtu}, depth {depth}, messages of {small} bytes"
        )
    ends = tuple(PairEnd(*fields) for fields in _PAIR.iter_unpack(pairs))
    if any(end.number >= 1 << 24 or end.psn >= 1 << 24 for end in ends):
        raise ProtocolError("a queue pair of more than 24 bits in an RDMA negotiation")
    return lowest, highest, Side(layer, kind_of_gid, gid, lid, mtu, depth, small, tag, ends)
