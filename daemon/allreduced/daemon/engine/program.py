"""One member's part of a schedule, in the shape that the interpreter wants: per block, levels and sends.

A block's value at a member has *levels*: level 0 is the reduction of the local inputs, each further one is what the
receives of one step make of it. A send belongs to the level that the value has before the step of the send.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from allreduced.schedules.schedule import Move, Schedule
from allreduced.schedules.select import schedule_for


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """The receives of one step. ``copy``: the value is taken as it is, from the only peer.

    ``own``: how many received values come before the own one in the order of reduction.
    """

    step: int
    copy: bool
    final: bool
    peers: tuple[int, ...]
    own: int


@dataclass(frozen=True, slots=True)
class SendPlan:
    """A send of what the block is at ``level``."""

    step: int
    peer: int
    level: int


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """What one member does with one block; ``levels`` are those after level 0."""

    levels: tuple[LevelPlan, ...]
    sends: tuple[SendPlan, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """What one member does. ``wide`` and ``by_member``: as in :class:`~allreduced.schedules.schedule.Schedule`."""

    blocks: tuple[BlockPlan, ...]
    wide: bool
    by_member: bool


def compile_program(schedule: Schedule, member: int) -> Program:
    """Return what ``member`` does."""
    levels: list[list[LevelPlan]] = [[] for _ in range(schedule.blocks)]
    sends: list[list[SendPlan]] = [[] for _ in range(schedule.blocks)]
    rows = (schedule.member == member).nonzero()[0].tolist()
    for row in rows:
        block, step = int(schedule.block[row]), int(schedule.step[row])
        move, peer, final = int(schedule.move[row]), int(schedule.peer[row]), bool(schedule.final[row])
        mine = levels[block]
        if move == Move.SEND:
            sends[block].append(SendPlan(step, peer, len(mine)))
            continue
        peers: tuple[int, ...] = (peer,)
        if mine and mine[-1].step == step:
            peers = (*mine.pop().peers, peer)
        own = bisect_left(peers, member) if schedule.by_member else 0
        copy = move == Move.RECV_COPY
        mine.append(LevelPlan(step, copy, final or copy, peers, own))
    blocks = tuple(BlockPlan(tuple(levels[block]), tuple(sends[block])) for block in range(schedule.blocks))
    return Program(blocks, schedule.wide, schedule.by_member)


@lru_cache(maxsize=1024)
def program_for(kind: str, algorithm: str, members: int, root: int, member: int) -> Program:
    """Return :func:`compile_program` of ``select.schedule_for`` with these arguments."""
    return compile_program(schedule_for(kind, algorithm, members, root), member)
