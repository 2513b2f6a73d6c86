"""Proof of a schedule: who holds which contributions after each row, without tensors.

The verifier runs all members at once, with two tiles per block and a receive window of a single tile per row, by the
rules of the engine: a tile leaves when it has the value of its step and the receiver has a free slot; a reduction
takes one tile from each peer of its step at once, in place, so it waits until that tile is sent where its own step or
an earlier one sends it; a slot is free again after the reduction. What cannot go on under these rules is a deadlock.
A final value lands in its place at any time, so what the member sent from there must be a cause of that value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from allreduced.schedules.schedule import Move, Schedule, block_bounds

TILES = 2
Key: TypeAlias = "tuple[int, int, int, int, int]"
"""(receiver, block, step, sender, tile): a tile on its way."""


class ScheduleError(Exception):
    """The schedule is wrong; the message says where."""


@dataclass(slots=True)
class _Level:
    """A value of one block at one member: what it becomes by the receives of ``step``."""

    step: int
    copy: bool
    final: bool
    peers: list[int]
    done: int = 0
    values: list[int] = field(default_factory=list)
    """Contributions of each finished tile, as bits."""
    causes: list[int] = field(default_factory=list)
    """Sends (numbered per block) that came before each finished tile, as bits."""


@dataclass(slots=True)
class _Block:
    """One block at one member; ``levels[0]`` is the member's own value."""

    levels: list[_Level]
    sends: list[tuple[int, int, int, int]]
    """(step, peer, level, number of the send within its block)"""
    sent: list[int]


def verify(
    schedule: Schedule, *, contributors: Sequence[int] | None = None, traffic: Callable[[int, Sequence[int]], int]
) -> None:
    """Prove that every member ends with every block final and made of each contribution exactly once.

    ``contributors`` are the members whose values belong into the result (default all; the root of a broadcast).
    ``traffic(member, sizes)`` is the algorithm's formula for the elements that a member sends for blocks of ``sizes``.

    :raises ScheduleError: rows out of order, a row without its counterpart, a value sent that the member does not
        have, a contribution missing or twice, a value used after it was replaced, a deadlock, or other traffic.
    """
    whole = sum(1 << member for member in (contributors if contributors is not None else range(schedule.members)))
    table = _blocks(schedule)
    _match(schedule)
    _run(schedule, table, whole)
    for (member, block), state in table.items():
        last = state.levels[-1]
        where = f"{schedule.algorithm}: member {member}, block {block}"
        if last.done < TILES or any(count < TILES for count in state.sent):
            raise ScheduleError(f"{where}: cannot go on with a receive window of one tile")
        if not last.final:
            raise ScheduleError(f"{where}: is not final at the end")
        if any(value != whole for value in last.values):
            raise ScheduleError(f"{where}: ends with contributions {last.values[0]:b}, wanted {whole:b}")
    _check_traffic(schedule, traffic)


def _blocks(schedule: Schedule) -> dict[tuple[int, int], _Block]:
    rows = _rows(schedule)
    if rows != sorted(rows):
        raise ScheduleError(f"{schedule.algorithm}: rows are not sorted")
    if len({row[:5] for row in rows}) != len(rows):
        raise ScheduleError(f"{schedule.algorithm}: a row is there twice")
    table = {
        (member, block): _Block([_Level(-1, False, True, [], TILES, [1 << member] * TILES, [0] * TILES)], [], [])
        for member in range(schedule.members)
        for block in range(schedule.blocks)
    }
    numbers = [0] * schedule.blocks
    for member, block, step, move, peer, final in rows:
        if not (0 <= peer < schedule.members and peer != member and (member, block) in table and step >= 0):
            raise ScheduleError(f"{schedule.algorithm}: row of member {member}, block {block} is out of range")
        state = table[member, block]
        if move == Move.SEND:
            level = len(state.levels) - 1
            if state.levels[-1].step == step:
                raise ScheduleError(f"{schedule.algorithm}: rows are not sorted")
            state.sends.append((step, peer, level, numbers[block]))
            numbers[block] += 1
            state.sent.append(0)
            continue
        copy = move == Move.RECV_COPY
        if state.levels[-1].step != step:
            if len(state.levels) > 1 and state.levels[-1].final:
                raise ScheduleError(f"{schedule.algorithm}: member {member} changes block {block} after it was final")
            state.levels[0].final = False
            state.levels.append(_Level(step, copy, bool(final), [peer]))
            continue
        top = state.levels[-1]
        if copy or top.copy or top.final != bool(final):
            raise ScheduleError(f"{schedule.algorithm}: member {member}, block {block}, step {step}: receives disagree")
        top.peers.append(peer)
    return table


def _rows(schedule: Schedule) -> list[tuple[int, ...]]:
    columns = (schedule.member, schedule.block, schedule.step, schedule.move, schedule.peer, schedule.final)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _match(schedule: Schedule) -> None:
    sends, receives = set(), set()
    for member, block, step, move, peer, _ in _rows(schedule):
        if move == Move.SEND:
            sends.add((member, peer, block, step))
        else:
            receives.add((peer, member, block, step))
    for sender, receiver, block, step in sorted(sends ^ receives):
        raise ScheduleError(
            f"{schedule.algorithm}: step {step}, block {block}: {sender} to {receiver} has only one of send and receive"
        )


def _run(schedule: Schedule, table: dict[tuple[int, int], _Block], whole: int) -> None:
    """Run all blocks of all members until nothing moves any more."""
    landed: dict[Key, tuple[int, int]] = {}
    waiting = deque(table)
    queued = set(waiting)
    while waiting:
        key = waiting.popleft()
        queued.discard(key)
        for other in _pump(schedule, table, landed, key, whole):
            if other not in queued:
                queued.add(other)
                waiting.append(other)


def _pump(
    schedule: Schedule,
    table: dict[tuple[int, int], _Block],
    landed: dict[Key, tuple[int, int]],
    key: tuple[int, int],
    whole: int,
) -> list[tuple[int, int]]:
    """Do what one block of one member can do now; return the blocks that this wakes."""
    member, block = key
    state = table[key]
    woken: list[tuple[int, int]] = []
    moved = True
    while moved:
        moved = False
        for index, (step, peer, level, number) in enumerate(state.sends):
            source = state.levels[level]
            tile = state.sent[index]
            if tile < source.done and tile == _received(table[peer, block], step):
                landed[peer, block, step, member, tile] = (source.values[tile], source.causes[tile] | 1 << number)
                state.sent[index] = tile + 1
                woken.append((peer, block))
                moved = True
        for index in range(1, len(state.levels)):
            level_ = state.levels[index]
            tile = level_.done
            before = state.levels[index - 1]
            arrived = all((member, block, level_.step, peer, tile) in landed for peer in level_.peers)
            if tile == TILES or not arrived or (not level_.copy and before.done <= tile):
                continue
            if not level_.copy and any(
                state.sent[number] <= tile for number, (_, _, used, _) in enumerate(state.sends) if used == index - 1
            ):
                continue
            where = f"{schedule.algorithm}: member {member}, block {block}, step {level_.step}"
            value, causes = (0, 0) if level_.copy else (before.values[tile], before.causes[tile])
            for peer in level_.peers:
                part, past = landed.pop((member, block, level_.step, peer, tile))
                if value & part:
                    raise ScheduleError(f"{where}: adds a contribution twice")
                value |= part
                causes |= past
            if level_.final and value != whole:
                raise ScheduleError(f"{where}: calls {value:b} final, wanted {whole:b}")
            if level_.copy and any(used < index and not causes >> number & 1 for _, _, used, number in state.sends):
                raise ScheduleError(f"{where}: the final value may land before the value in its place was sent")
            level_.values.append(value)
            level_.causes.append(causes)
            level_.done += 1
            woken.extend((peer, block) for peer in level_.peers)
            moved = True
    return woken


def _received(state: _Block, step: int) -> int:
    """Return how many tiles of ``step`` the receiver has used up: the next one is the one that it has a slot for."""
    return next(level.done for level in state.levels if level.step == step)


def _check_traffic(schedule: Schedule, traffic: Callable[[int, Sequence[int]], int]) -> None:
    for count in (0, 1, 1000, 64 * schedule.blocks + 37):
        bounds = block_bounds(count, schedule.blocks)
        sizes = [end - start for start, end in pairwise(bounds)]
        sent = [0] * schedule.members
        for member, block, _, move, _, _ in _rows(schedule):
            if move == Move.SEND:
                sent[member] += sizes[block]
        for member in range(schedule.members):
            if sent[member] != traffic(member, sizes):
                raise ScheduleError(
                    f"{schedule.algorithm}: member {member} sends {sent[member]} of {count} elements, "
                    f"the formula says {traffic(member, sizes)}"
                )
