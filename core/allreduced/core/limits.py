"""Ranges and lengths of values that cross a wire, written into the types of message fields.

A field says ``rank: Rank``; type checkers read ``int``, and ``protocol.codec`` reads the range from the annotation and
refuses everything outside it. The numbers are part of the protocol, see ``docs/protocol.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from allreduced.core.errors import InvalidArgument

MAX_RANKS = 1 << 16
"""Ranks of one group at most."""

MAX_NAME = 256
"""Bytes (UTF-8) of the name of a job, a group, an operation or a node at most."""

MAX_SHAPE = 1024
"""Bytes of the text of a shape at most."""

MAX_SECONDS = 1e9
"""The longest duration that can be told, some 31 years; stands for "no limit"."""

MAX_COUNT = (1 << 63) - 1
"""The largest element count, byte count or offset."""


@dataclass(frozen=True, slots=True)
class Between:
    """The field's value is from ``lowest`` to ``highest``, both included."""

    lowest: int
    highest: int


@dataclass(frozen=True, slots=True)
class Seconds:
    """The field is a duration: finite, from 0 to ``highest`` seconds."""

    highest: float


@dataclass(frozen=True, slots=True)
class AtMost:
    """The field's length: bytes of UTF-8 for text, bytes, or items of a tuple."""

    length: int


Id: TypeAlias = Annotated[int, Between(0, (1 << 64) - 1)]
U8: TypeAlias = Annotated[int, Between(0, (1 << 8) - 1)]
U16: TypeAlias = Annotated[int, Between(0, (1 << 16) - 1)]
U32: TypeAlias = Annotated[int, Between(0, (1 << 32) - 1)]
Signed: TypeAlias = Annotated[int, Between(-(1 << 63), (1 << 63) - 1)]
Priority: TypeAlias = Annotated[int, Between(-(1 << 31), (1 << 31) - 1)]
Count: TypeAlias = Annotated[int, Between(0, MAX_COUNT)]
CountOrNone: TypeAlias = Annotated[int, Between(-1, MAX_COUNT)]
"""-1 stands for none."""
Rank: TypeAlias = Annotated[int, Between(0, MAX_RANKS - 1)]
RankOrNone: TypeAlias = Annotated[int, Between(-1, MAX_RANKS - 1)]
"""-1 stands for none."""
Size: TypeAlias = Annotated[int, Between(1, MAX_RANKS)]
Duration: TypeAlias = Annotated[float, Seconds(MAX_SECONDS)]
Ranks: TypeAlias = Annotated[tuple[Rank, ...], AtMost(MAX_RANKS)]
Ids: TypeAlias = Annotated[tuple[Id, ...], AtMost(MAX_RANKS)]
Name: TypeAlias = Annotated[str, AtMost(MAX_NAME)]
Word: TypeAlias = Annotated[str, AtMost(64)]
"""One of a few words, such as the kind of an operation."""
Text: TypeAlias = Annotated[str, AtMost(4096)]
ShapeText: TypeAlias = Annotated[str, AtMost(MAX_SHAPE)]


def check_name(what: str, name: str) -> None:
    """Check a name that the user gave, before it goes on a wire. ``what`` names the argument in the message.

    :raises InvalidArgument: it is too long, or no text that UTF-8 can tell.
    """
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} {name!r} cannot be told in UTF-8", hint="use plain text") from None
    if length > MAX_NAME:
        raise InvalidArgument(f"{what} has {length} bytes, at most {MAX_NAME} are allowed: {name[:40]!r}…")
