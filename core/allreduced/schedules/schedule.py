"""A schedule: what every member does with every block, as arrays of numbers."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Move(enum.IntEnum):
    """What one row of a schedule does with its block."""

    SEND = 0
    """Send the block's current value to ``peer``."""
    RECV_REDUCE = 1
    """Receive the peer's value and add it to the own one. Rows of one block in one step form one reduction."""
    RECV_COPY = 2
    """Receive the final value from ``peer``."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rows of all members, sorted by (member, block, step, move, peer); every array has one entry a row, int32.

    A member's value of a block begins as the reduction of its local inputs (ranks ascending). It is *final* after the
    member's last RECV_REDUCE of that block if ``final`` is 1 in that row, or after RECV_COPY, or, for blocks that a
    member finishes alone, from the start (no RECV rows at all). The order of reduction is: local inputs by rank, then
    received values by ascending peer, step by step. A SEND of step ``s`` sends what the member had before step ``s``.

    ``wide``: values are rounded at several hops before they are final, so those that are not final are kept and sent in
    the accumulator's type (float32 for 16-bit floats) where the reduction rounds.
    ``by_member``: in a reduction all values come by ascending member. The own one, which is the reduction of the local
    inputs, rounded as if it had been sent, has its place among those received.
    """

    algorithm: str
    members: int
    blocks: int
    member: npt.NDArray[np.int32]
    block: npt.NDArray[np.int32]
    step: npt.NDArray[np.int32]
    move: npt.NDArray[np.int32]
    peer: npt.NDArray[np.int32]
    final: npt.NDArray[np.int32]
    wide: bool = False
    by_member: bool = False


class Traffic(NamedTuple):
    """Elements that a member sends: of values that are not final yet, and of final ones, which may be narrower."""

    partial: int
    final: int

    def nbytes(self, partial_itemsize: int, itemsize: int) -> int:
        """Return the bytes, where a value that is not final has ``partial_itemsize`` bytes per element."""
        return self.partial * partial_itemsize + self.final * itemsize


class Row(NamedTuple):
    """One row of a schedule; the fields are the arrays of :class:`Schedule`."""

    member: int
    block: int
    step: int
    move: Move
    peer: int
    final: bool


def from_rows(
    algorithm: str, members: int, blocks: int, rows: Iterable[Row], *, wide: bool = False, by_member: bool = False
) -> Schedule:
    """Return the schedule with these rows, which may come in any order."""
    table = np.array(sorted(rows), dtype=np.int32).reshape(-1, len(Row._fields))
    columns = {name: np.ascontiguousarray(table[:, index]) for index, name in enumerate(Row._fields)}
    for column in columns.values():
        column.flags.writeable = False
    return Schedule(algorithm, members, blocks, **columns, wide=wide, by_member=by_member)


def block_bounds(count: int, blocks: int) -> tuple[int, ...]:
    """Return ``blocks + 1`` ascending element offsets that split ``count`` elements; blocks may be empty.

    Boundaries are multiples of 64 elements where every block has at least 64, so that kernels and cache lines of
    neighbours do not meet; the sizes then differ by less than 128 elements, else by at most 1.
    """
    if count >= 64 * blocks:
        units = count // 64
        return (*(64 * (units * index // blocks) for index in range(blocks)), count)
    return tuple(count * index // blocks for index in range(blocks + 1))
