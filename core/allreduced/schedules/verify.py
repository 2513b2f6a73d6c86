"""Proof of a schedule: who holds which contributions after each row, without tensors.

The verifier runs all members at once, with a few tiles per block and receive windows of fewer tiles, by the rules of
the engine: a tile leaves when it has the value of its step and the receiver has a free slot; a reduction takes one tile
from each peer of its step at once; its slots are free again after it. What cannot go on by these rules is a deadlock.

Where a value lives that is not final: usually in its place in the result. Then a reduction in place waits until that
tile is sent where its own step or an earlier one sends it, and as the final value lands there at any time, what the
member sent from there must be a cause of it. Wide values (``Schedule.wide``) have a window of their own for each level:
a slot of it is free again when the tile was sent and the next level has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from allreduced.schedules.schedule import Move, Schedule, Traffic, block_bounds

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


@dataclass(frozen=True, slots=True)
class _Rules:
    """What is proven: ``whole`` is the wanted value; ``wide``: values that are not final have windows of their own."""

    schedule: Schedule
    whole: int
    tiles: int
    window: int
    wide: bool


def verify(
    schedule: Schedule,
    *,
    contributors: Sequence[int] | None = None,
    traffic: Callable[[int, Sequence[int]], Traffic],
    tiles: int = 2,
    window: int = 1,
    wide: bool = False,
) -> None:
    """Prove that every member ends with every block final and made of each contribution exactly once.

    ``contributors`` are the members whose values belong into the result (default all; the root of a broadcast).
    ``traffic(member, sizes)`` is the algorithm's formula for what a member sends for blocks of ``sizes`` elements.
    Blocks have ``tiles`` tiles and windows have room for ``window`` of them. ``wide``: as for 16-bit floats, whose
    partial values are wider than the result.

    :raises ScheduleError: rows out of order, a row without its counterpart, a value sent that the member does not
        have, a contribution missing or twice, a value used after it was replaced, an order of reduction that is not by
        member where it should be, a deadlock, or other traffic.
    """
    whole = sum(1 << member for member in (contributors if contributors is not None else range(schedule.members)))
    rules = _Rules(schedule, whole, tiles, window, wide and schedule.wide)
    table = _blocks(rules)
    _match(schedule)
    _run(rules, table)
    for (member, block), state in table.items():
        last = state.levels[-1]
        where = f"{schedule.algorithm}: member {member}, block {block}"
        if last.done < tiles or any(count < tiles for count in state.sent):
            raise ScheduleError(f"{where}: cannot go on with windows of {window} tiles")
        if not last.final:
            raise ScheduleError(f"{where}: is not final at the end")
        if any(value != whole for value in last.values):
            raise ScheduleError(f"{where}: ends with contributions {last.values[0]:b}, wanted {whole:b}")
    _check_traffic(schedule, table, traffic)


def _blocks(rules: _Rules) -> dict[tuple[int, int], _Block]:
    schedule, tiles = rules.schedule, rules.tiles
    rows = _rows(schedule)
    if rows != sorted(rows):
        raise ScheduleError(f"{schedule.algorithm}: rows are not sorted")
    if len({row[:5] for row in rows}) != len(rows):
        raise ScheduleError(f"{schedule.algorithm}: a row is there twice")
    table = {
        (member, block): _Block([_Level(-1, False, True, [], tiles, [1 << member] * tiles, [0] * tiles)], [], [])
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
    if rules.wide:
        for state in table.values():
            own = state.levels[0]
            if not own.final and any(level == 0 for _, _, level, _ in state.sends):
                own.done = 0  # it goes through a window; where it is only reduced, the inputs themselves are read
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


def _run(rules: _Rules, table: dict[tuple[int, int], _Block]) -> None:
    """Run all blocks of all members until nothing moves any more."""
    landed: dict[Key, tuple[int, int]] = {}
    waiting = deque(table)
    queued = set(waiting)
    while waiting:
        key = waiting.popleft()
        queued.discard(key)
        for other in _pump(rules, table, landed, key):
            if other not in queued:
                queued.add(other)
                waiting.append(other)


def _pump(
    rules: _Rules, table: dict[tuple[int, int], _Block], landed: dict[Key, tuple[int, int]], key: tuple[int, int]
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
            if tile < source.done and tile < _received(table[peer, block], step) + rules.window:
                landed[peer, block, step, member, tile] = (source.values[tile], source.causes[tile] | 1 << number)
                state.sent[index] = tile + 1
                woken.append((peer, block))
                moved = True
        for index, level_ in enumerate(state.levels):
            if level_.done == rules.tiles or not _may_reduce(rules, state, index):
                continue
            if index == 0:
                level_.done += 1
                moved = True
                continue
            tile = level_.done
            if any((member, block, level_.step, peer, tile) not in landed for peer in level_.peers):
                continue
            _reduce(rules, state, landed, key, index)
            woken.extend((peer, block) for peer in level_.peers)
            moved = True
    return woken


def _may_reduce(rules: _Rules, state: _Block, index: int) -> bool:
    """Return whether the next tile of a level has what it needs at its own member, and a place to go."""
    level, tile = state.levels[index], state.levels[index].done
    if level.copy:
        return True
    if index and state.levels[index - 1].done <= tile:
        return False
    if not rules.wide:
        return all(state.sent[number] > tile for number, (_, _, used, _) in enumerate(state.sends) if used == index - 1)
    if level.final:
        return True
    free = min(
        (state.sent[number] for number, (_, _, used, _) in enumerate(state.sends) if used == index), default=tile
    )
    following = state.levels[index + 1] if index + 1 < len(state.levels) else None
    if following is not None and not following.copy:
        free = min(free, following.done)
    return tile < free + rules.window


def _reduce(rules: _Rules, state: _Block, landed: dict[Key, tuple[int, int]], key: tuple[int, int], index: int) -> None:
    member, block = key
    level, before = state.levels[index], state.levels[index - 1]
    tile = level.done
    where = f"{rules.schedule.algorithm}: member {member}, block {block}, step {level.step}"
    value, causes = (0, 0) if level.copy else (before.values[tile], before.causes[tile])
    for peer in level.peers:
        part, past = landed.pop((member, block, level.step, peer, tile))
        if value & part:
            raise ScheduleError(f"{where}: adds a contribution twice")
        if rules.schedule.by_member and not level.copy and (index > 1 or part != 1 << peer):
            raise ScheduleError(f"{where}: does not reduce member by member")
        value |= part
        causes |= past
    if level.final and value != rules.whole:
        raise ScheduleError(f"{where}: calls {value:b} final, wanted {rules.whole:b}")
    if level.copy and any(used < index and not causes >> number & 1 for _, _, used, number in state.sends):
        raise ScheduleError(f"{where}: the final value may land before the value in its place was sent")
    level.values.append(value)
    level.causes.append(causes)
    level.done += 1


def _received(state: _Block, step: int) -> int:
    """Return how many tiles of ``step`` the receiver has used up: the next one is the one that it has a slot for."""
    return next(level.done for level in state.levels if level.step == step)


def _check_traffic(
    schedule: Schedule, table: dict[tuple[int, int], _Block], traffic: Callable[[int, Sequence[int]], Traffic]
) -> None:
    shape = (schedule.members, schedule.blocks)
    partial, final = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for key, state in table.items():
        for _, _, level, _ in state.sends:
            (final if state.levels[level].final else partial)[key] += 1
    for count in (0, 1, 1000, 64 * schedule.blocks + 37):
        sizes = np.diff(block_bounds(count, schedule.blocks)).tolist()
        for member in range(schedule.members):
            sent = Traffic(int(partial[member] @ sizes), int(final[member] @ sizes))
            wanted = traffic(member, sizes)
            if sent != wanted:
                raise ScheduleError(
                    f"{schedule.algorithm}: member {member} sends {sent} of {count} elements, the formula says {wanted}"
                )
