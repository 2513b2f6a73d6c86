"""The state of one block of a running operation: how far its levels, receives and sends are.

Progress is kept as a prefix of tiles plus the few ranges that completed out of order, so that its cost is per range.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

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

    __slots__ = ("arrived", "block", "granted", "itemsize", "left", "level", "peer", "slots", "step", "window")

    def __init__(self, block: Block, level: Level, peer: int, step: int, slots: int) -> None:
        self.block = block
        self.level = level
        self.peer = peer
        self.step = step
        self.slots = slots
        """Tiles that may be on their way at once."""
        self.itemsize = 0
        """Bytes of an element on the way."""
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
    """One value of a block.

    ``kept``: it has memory of its own, a window in the scratch if ``wide``, else its place in the result. Level 0 need
    not be kept: what needs it reads the clients' inputs. ``of_source``: it is sent straight from the only input.
    """

    __slots__ = (
        "copy",
        "final",
        "index",
        "issued",
        "itemsize",
        "kept",
        "of_source",
        "own",
        "progress",
        "receives",
        "sends",
        "wide",
        "window",
    )

    def __init__(self, index: int, copy: bool, final: bool, own: int) -> None:
        self.index = index
        self.copy = copy
        self.final = final
        self.own = own
        """How many received values come before the own one."""
        self.kept = True
        self.wide = False
        self.of_source = False
        self.itemsize = 0
        """Bytes of an element, kept and sent."""
        self.window = -1
        """Offset of the slots in the operation's scratch, if ``wide``."""
        self.issued = 0
        self.progress = Progress()
        self.receives: list[ReceiveRow] = []
        self.sends: list[SendRow] = []


@dataclass(frozen=True, slots=True)
class Shape:
    """What the blocks of an operation have in common.

    ``tile``: elements; ``window``: tiles; ``itemsize`` and ``partial``: bytes of an element that is final, or not yet;
    ``sources``: inputs of this node; ``by_member``: see ``Schedule``.
    """

    tile: int
    window: int
    itemsize: int
    partial: int
    sources: int
    by_member: bool


class Block:
    """One block, elements ``offset … end-1`` of the tensor (at least one), in ``tiles`` tiles."""

    __slots__ = ("end", "levels", "number", "offset", "sends", "slots", "tiles")

    def __init__(self, number: int, plan: BlockPlan, offset: int, end: int, shape: Shape) -> None:
        self.number = number
        self.offset = offset
        self.end = end
        self.tiles = (end - offset + shape.tile - 1) // shape.tile
        self.slots = min(shape.window, self.tiles)
        """Tiles that each window has room for."""
        own = Level(0, False, not plan.levels, 0)
        self.levels = [own]
        for index, level_plan in enumerate(plan.levels, 1):
            level = Level(index, level_plan.copy, level_plan.final, level_plan.own)
            slots = self.tiles if level.copy else self.slots
            level.receives = [ReceiveRow(self, level, peer, level_plan.step, slots) for peer in level_plan.peers]
            for receive in level.receives:
                receive.itemsize = shape.itemsize if level.copy else shape.partial
            self.levels.append(level)
        self.sends: list[SendRow] = []
        for send_plan in plan.sends:
            row = SendRow(self, self.levels[send_plan.level], send_plan.peer, send_plan.step)
            row.level.sends.append(row)
            self.sends.append(row)
        for level in self.levels:
            level.itemsize = shape.itemsize if level.final else shape.partial
            level.wide = level.itemsize != shape.itemsize
        self._keep_own(own, shape)

    def _keep_own(self, own: Level, shape: Shape) -> None:
        """Decide where the local sum is."""
        if own.final:
            own.of_source = shape.sources == 1
            return
        if shape.sources == 0:  # other ranks are the root: there is no local sum
            own.kept = False
        elif own.wide:
            own.kept = bool(own.sends)
        elif shape.sources == 1:
            own.kept = False
            own.of_source = True
        else:
            # Nobody asks for the local sum alone: the first reduction with received tiles reads the inputs.
            own.kept = bool(own.sends) or shape.by_member
        if not own.kept:
            own.wide = False
            own.progress.done = own.issued = self.tiles
