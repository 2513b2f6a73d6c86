"""The state of one block of a running operation: how far its levels, receives and sends are.

Progress is kept as a prefix of tiles plus the few ranges that completed out of order, so that its cost is per range.
"""

from __future__ import annotations

from collections import deque

from allreduced.daemon.engine.program import BlockPlan


class Progress:
    """Tiles ``0 … done-1`` are complete; ``ahead`` holds ranges that completed before their turn, by first tile."""

    __slots__ = ("ahead", "done")

    def __init__(self) -> None:
        self.done = 0
        self.ahead: dict[int, int] | None = None

    def complete(self, first: int, end: int) -> None:
        """Take note that tiles ``first … end-1`` are complete."""
        ahead = self.ahead
        if first != self.done:
            if ahead is None:
                ahead = self.ahead = {}
            ahead[first] = end
            return
        while ahead and end in ahead:
            end = ahead.pop(end)
        self.done = end


class ReceiveRow:
    """What comes from ``peer`` for one level of a block, into ``slots`` slots (or straight into place)."""

    __slots__ = ("arrived", "block", "granted", "left", "level", "peer", "slots", "step", "window")

    def __init__(self, block: Block, level: Level, peer: int, step: int, slots: int) -> None:
        self.block = block
        self.level = level
        self.peer = peer
        self.step = step
        self.slots = slots
        """Tiles that may be on their way at once."""
        self.window = -1
        """Offset of the slots in the operation's scratch; -1 where tiles land in their final place."""
        self.granted = 0
        self.arrived = 0
        self.left: list[int] = []
        """Bytes that still have to land, per tile granted so far."""


class SendRow:
    """What goes to ``peer`` of one level of a block. ``grants``: (first tile, end, token), in order of the tiles."""

    __slots__ = ("block", "granted", "grants", "level", "next", "peer", "sent", "step")

    def __init__(self, block: Block, level: Level, peer: int, step: int) -> None:
        self.block = block
        self.level = level
        self.peer = peer
        self.step = step
        self.grants: deque[tuple[int, int, bytes]] = deque()
        self.granted = 0
        self.next = 0
        self.sent = Progress()


class Level:
    """One value of a block. ``in_place``: it is kept in the result region, else it is one client's input itself."""

    __slots__ = ("copy", "final", "in_place", "index", "issued", "progress", "receives", "sends")

    def __init__(self, index: int, copy: bool, final: bool) -> None:
        self.index = index
        self.copy = copy
        self.final = final
        self.in_place = True
        self.issued = 0
        self.progress = Progress()
        self.receives: list[ReceiveRow] = []
        self.sends: list[SendRow] = []


class Block:
    """One block of ``nbytes`` (more than 0) at ``offset`` of the tensor, in ``tiles`` tiles."""

    __slots__ = ("end", "levels", "number", "offset", "sends", "tiles")

    def __init__(
        self, number: int, plan: BlockPlan, offset: int, nbytes: int, tile: int, window: int, sources: int
    ) -> None:
        self.number = number
        self.offset = offset
        self.end = offset + nbytes
        self.tiles = (nbytes + tile - 1) // tile
        own = Level(0, False, not plan.levels)
        self.levels = [own]
        for index, level_plan in enumerate(plan.levels, 1):
            level = Level(index, level_plan.copy, level_plan.final)
            slots = self.tiles if level_plan.copy else min(window, self.tiles)
            level.receives = [ReceiveRow(self, level, peer, level_plan.step, slots) for peer in level_plan.peers]
            self.levels.append(level)
        self.sends: list[SendRow] = []
        for send_plan in plan.sends:
            row = SendRow(self, self.levels[send_plan.level], send_plan.peer, send_plan.step)
            row.level.sends.append(row)
            self.sends.append(row)
        if sources <= 1 and plan.levels:
            # One input: it is the value of level 0 itself. No input (other ranks are the root): there is no level 0.
            own.in_place = False
        elif sources > 1 and plan.levels and not own.sends:
            # Nobody asks for the local sum alone: the first reduction with received tiles reads the inputs.
            own.in_place = False
        if not own.in_place:
            own.progress.done = own.issued = self.tiles
