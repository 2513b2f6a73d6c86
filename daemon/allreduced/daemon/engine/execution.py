"""The interpreter: runs one member's program tile by tile.

Every tile of the tensor has one place in the result region. What a member needs of it before it is final is kept in
that same place (or is a client's input, where there is only one): a final value that arrives there later was made of
what was sent from there, which ``schedules.verify`` proves. A reduction in place waits until the tile is sent.

Partial sums that are wider than the result (16-bit floats on a schedule of several hops) have no room there. They are
made in windows of the scratch, whose slots are used again when the tile is sent and the next level has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.actions import PostReceive, Reduce, Send, SendFrame
from allreduced.daemon.engine.block import Block, Level, Progress, ReceiveRow, SendRow, Shape
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.flights import Job, Posting, Sending
from allreduced.daemon.engine.free_list import aligned
from allreduced.daemon.engine.operation import Operation
from allreduced.daemon.engine.plan import Plan
from allreduced.daemon.engine.program import Program
from allreduced.daemon.engine.region import Region
from allreduced.protocol.peer import Grant, MoreGrants
from allreduced.schedules.schedule import block_bounds

_SHARE = 4
"""Windows shrink to a single tile before those of one operation take more than this part of all scratch memory."""


class PeerFault(Exception):
    """A peer sent what the protocol does not allow; the operation ends with ProtocolError. Caught in the engine."""


class Execution:
    """The tensor part of one operation on this node, from its memory to its last byte."""

    __slots__ = (
        "_block_of",
        "_blocks",
        "_context",
        "_divisor",
        "_dtype",
        "_itemsize",
        "_narrow",
        "_operation",
        "_partial",
        "_reduction",
        "_result",
        "_rows_left",
        "_scratch",
        "_source_rows_left",
        "_sources",
        "_tile",
        "_unfinished",
        "nbytes",
        "scratch_bytes",
    )

    def __init__(
        self,
        context: Context,
        operation: Operation,
        plan: Plan,
        count: int,
        sources: Sequence[Region],
        program: Program,
    ) -> None:
        group = operation.group
        reduction = plan.reduction
        self._context = context
        self._operation = operation
        self._dtype = plan.dtype
        self._itemsize = itemsize = plan.dtype.itemsize
        self._reduction = reduction
        self._partial = Reduction.SUM if reduction is Reduction.MEAN else reduction
        self._divisor = group.size if reduction is Reduction.MEAN else 1
        self._sources = tuple(sources)
        partial = plan.partial.itemsize if program.wide else itemsize
        self._narrow = partial != itemsize
        self._tile = tile = max(1, group.tile_bytes // partial)
        self.nbytes = count * itemsize
        bounds = (0, count) if len(program.blocks) == 1 else block_bounds(count, len(program.blocks))
        present = [number for number in range(len(program.blocks)) if bounds[number] < bounds[number + 1]]
        rows = sum(
            (1 + self._narrow) * len(level.peers)
            for number in present
            for level in program.blocks[number].levels
            if not level.copy
        )
        limits = context.limits
        share = limits.scratch_bytes // _SHARE
        window = min(limits.window_tiles, max(1, share // max(1, rows * tile * partial)))
        shape = Shape(tile, window, itemsize, partial, len(self._sources), program.by_member)
        self._blocks = [
            Block(number, program.blocks[number], bounds[number], bounds[number + 1], shape) for number in present
        ]
        self._block_of = {block.number: block for block in self._blocks}
        self._unfinished = len(self._blocks)
        self._rows_left = sum(len(block.sends) for block in self._blocks)
        self._source_rows_left = sum(len(block.levels[0].sends) for block in self._blocks if block.levels[0].of_source)
        self.scratch_bytes = self._lay_out_windows()
        self._result = Region(-1, 0, 0)
        self._scratch = Region(-1, 0, 0)

    def _lay_out_windows(self) -> int:
        offset = 0
        for block in self._blocks:
            elements = min(block.slots * self._tile, block.end - block.offset)
            for level in block.levels:
                if level.wide:
                    level.window = offset
                    offset += aligned(elements * level.itemsize)
                for row in level.receives:
                    if not level.copy:
                        row.window = offset
                        offset += aligned(elements * row.itemsize)
        return offset

    @property
    def final(self) -> bool:
        """True when every tile of the result is final and nothing needs the inputs any more."""
        return self._unfinished == 0 and self._source_rows_left == 0

    @property
    def complete(self) -> bool:
        """True when the result is final and everything that peers get from here was sent."""
        return self._unfinished == 0 and self._rows_left == 0

    @property
    def result(self) -> Region:
        """Where the result is."""
        return self._result

    def place(self, result: Region, scratch: Region) -> None:
        """Set the memory: ``nbytes`` for the result and ``scratch_bytes`` for receive windows."""
        self._result = result
        self._scratch = scratch

    def post(self) -> None:
        """Post the first receives of every row (again, after a withdrawal)."""
        for block in self._blocks:
            for level in block.levels[1:]:
                level.progress = Progress()
                for row in level.receives:
                    row.granted = row.arrived = 0
                    row.left = []
                    self._grant(row, row.slots)

    def grants(self, peer: int) -> tuple[Grant, ...]:
        """Return the grants of the receives that are posted for ``peer``."""
        return tuple(_as_grant(posting) for posting in self._operation.postings.values() if posting.row.peer == peer)

    def start(self) -> None:
        """Begin: all members are ready and their first grants were taken by :meth:`accept`."""
        for block in self._blocks:
            self._pump(block)

    def accept(self, peer: int, grants: Sequence[Grant], *, pump: bool) -> None:
        """Take grants of a peer.

        :raises PeerFault: they do not fit this member's sends.
        """
        for grant in grants:
            block = self._block_of.get(grant.block)
            row = None
            if block is not None:
                for row in block.sends:
                    if row.peer == peer and row.step == grant.step:
                        break
                else:
                    row = None
            if block is None or row is None:
                raise PeerFault(f"granted block {grant.block} in step {grant.step}, which nobody sends")
            end = grant.first + grant.tiles
            if grant.tiles < 1 or grant.first != row.granted or end > block.tiles:
                raise PeerFault(
                    f"granted tiles {grant.first} to {end - 1} of block {grant.block}, expected tile {row.granted} on"
                )
            row.granted = end
            row.grants.append((grant.first, end, grant.token))
            if pump:
                self._pump(block)

    def received(self, posting: Posting, offset: int, nbytes: int) -> None:
        """Count bytes that landed.

        :raises PeerFault: they do not fit the posted receive, or came twice.
        """
        if nbytes < 1 or offset < 0 or offset + nbytes > posting.nbytes or nbytes > posting.left:
            raise PeerFault(f"sent {nbytes} bytes at {offset} of a receive of {posting.nbytes} bytes")
        row = posting.row
        tile, left = self._tile * row.itemsize, row.left
        index = posting.first + offset // tile
        within = offset % tile
        rest = nbytes
        while rest:
            piece = min(rest, tile - within)
            left[index] -= piece
            if left[index] < 0:
                raise PeerFault(f"sent a part of tile {index} of block {row.block.number} twice")
            rest -= piece
            within = 0
            index += 1
        posting.left -= nbytes
        if posting.left == 0:
            del self._context.receives[posting.number], self._operation.postings[posting.number]
        before = arrived = row.arrived
        while arrived < row.granted and left[arrived] == 0:
            arrived += 1
        row.arrived = arrived
        if arrived == before:
            return
        level, block = row.level, row.block
        if level.copy:
            level.progress.done = level.issued = arrived
            if arrived == block.tiles and level is block.levels[-1]:
                self._unfinished -= 1

    def resume(self, block: Block) -> None:
        """Do what became possible for a block of a started operation."""
        self._pump(block)

    def reduced(self, job: Job) -> None:
        """Take note of a finished kernel job and do what it makes possible."""
        level, block = job.level, job.block
        if level is None or block is None:
            return
        before = level.progress.done
        level.progress.complete(job.first, job.end)
        done = level.progress.done
        if done == before:
            return
        if done == block.tiles and level is block.levels[-1]:
            self._unfinished -= 1
        if level.receives and level.receives[0].granted < block.tiles:
            self._grant_more(level, done)
        self._pump(block)

    def sent(self, sending: Sending) -> None:
        """Take note that the memory of a send is free, and do what it makes possible."""
        row = sending.row
        row.sent.complete(sending.first, sending.end)
        if row.sent.done == row.block.tiles:
            self._rows_left -= 1
            self._source_rows_left -= sending.of_source
        if row.level.index + 1 < len(row.block.levels):
            self._pump(row.block)

    def dispose(self) -> None:
        """Let go of everything. Blocks and rows know each other, which would leave them to the garbage collector."""
        for block in self._blocks:
            block.levels = []
            block.sends = []

    def unserved(self) -> list[int]:
        """Return the members from which data is still due, ascending."""
        return sorted(
            {
                row.peer
                for block in self._blocks
                for level in block.levels
                for row in level.receives
                if row.arrived < block.tiles
            }
        )

    def _pump(self, block: Block) -> None:
        for level in block.levels:
            if level.issued < block.tiles and not level.copy:
                self._reduce(block, level)
        for row in block.sends:
            if row.next < row.granted:
                self._send(block, row)

    def _ready_tiles(self, block: Block, level: Level) -> int:
        """Return how many tiles of a level have all that their reduction needs."""
        if level.index:
            before = block.levels[level.index - 1]
            limit = before.progress.done
            for row in level.receives:
                limit = min(limit, row.arrived)
            if before.kept and not before.wide:  # it is in the place where this level goes
                for send in before.sends:
                    limit = min(limit, send.sent.done)
        elif level.final:
            limit = block.tiles
        elif level.sends:
            limit = max(send.granted for send in level.sends)
        else:
            limit = block.levels[1].receives[0].granted
        if level.wide:
            used = limit
            for send in level.sends:
                used = min(used, send.sent.done)
            if level.index + 1 < len(block.levels) and not block.levels[level.index + 1].copy:
                used = min(used, block.levels[level.index + 1].progress.done)
            limit = min(limit, used + block.slots)
        return limit

    def _reduce(self, block: Block, level: Level) -> None:
        """Issue the reductions of a level that have all their inputs."""
        limit = self._ready_tiles(block, level)
        first = level.issued
        if first >= limit:
            return
        before = block.levels[level.index - 1] if level.index else None
        from_inputs = before is None or not before.kept
        in_turns = bool(level.receives) or level.wide
        partials = len(level.receives) + (not from_inputs) if self._narrow else 0
        operation, context = self._operation, self._context
        while first < limit:
            # Slots are used in turns: a range that wraps around is two jobs.
            end = min(limit, first - first % block.slots + block.slots) if in_turns else limit
            low = block.offset + first * self._tile
            count = min(block.offset + end * self._tile, block.end) - low
            if before is None or not before.kept:
                offset, nbytes = low * self._itemsize, count * self._itemsize
                own = [Region(source.buffer, source.offset + offset, nbytes) for source in self._sources]
                operation.source_readers += 1
            else:
                own = [self._place(block, before, first, count)]
            received = [self._slot(row.window, first % row.slots, row.itemsize, count) for row in level.receives]
            number = context.number()
            context.jobs[number] = Job(operation, block, level, first, end, from_inputs)
            operation.outstanding += 1
            context.out.append(
                Reduce(
                    number,
                    self._dtype,
                    self._reduction if level.final else self._partial,
                    self._divisor if level.final else 1,
                    count,
                    (*received[: level.own], *own, *received[level.own :]),
                    self._place(block, level, first, count),
                    operation.priority,
                    partials,
                    level.wide,
                    operation.group.key.uid,
                )
            )
            level.issued = first = end

    def _place(self, block: Block, level: Level, tile: int, count: int) -> Region:
        """Return where ``count`` elements of a level are, from ``tile`` on; they do not wrap around its window."""
        if level.wide:
            return self._slot(level.window, tile % block.slots, level.itemsize, count)
        offset = (block.offset + tile * self._tile) * self._itemsize
        return Region(self._result.buffer, self._result.offset + offset, count * self._itemsize)

    def _slot(self, window: int, slot: int, itemsize: int, count: int) -> Region:
        offset = window + slot * self._tile * itemsize
        return Region(self._scratch.buffer, self._scratch.offset + offset, count * itemsize)

    def _send(self, block: Block, row: SendRow) -> None:
        """Send what is there of a row and granted."""
        operation, context = self._operation, self._context
        level, tile = row.level, self._tile
        available = block.tiles if level.of_source else level.progress.done
        while row.next < available and row.grants:
            first, granted_end, token = row.grants[0]
            end = min(available, granted_end)
            if level.wide:
                end = min(end, row.next - row.next % block.slots + block.slots)
            low = block.offset + row.next * tile
            count = min(block.offset + end * tile, block.end) - low
            if level.of_source:
                source, itemsize = self._sources[0], self._itemsize
                region = Region(source.buffer, source.offset + low * itemsize, count * itemsize)
            else:
                region = self._place(block, level, row.next, count)
            number, node = context.number(), operation.group.members[row.peer].node
            sending = Sending(operation, row, row.next, end, level.of_source, node)
            context.sends[number] = operation.sendings[number] = sending
            operation.outstanding += 1
            operation.source_readers += level.of_source
            context.out.append(
                Send(
                    number,
                    node,
                    token,
                    (row.next - first) * tile * level.itemsize,
                    region,
                    operation.peers[row.peer].tag,
                    operation.priority,
                    operation.group.key.uid,
                )
            )
            row.next = end
            if end == granted_end:
                row.grants.popleft()

    def _grant(self, row: ReceiveRow, limit: int) -> list[Posting]:
        """Post receives for the tiles of ``row`` from the last granted one to ``limit``."""
        postings = []
        block, level, context = row.block, row.level, self._context
        tile_bytes = self._tile * row.itemsize
        while row.granted < limit:
            first = row.granted
            end = min(limit, first - first % row.slots + row.slots)
            count = min(end * self._tile, block.end - block.offset) - first * self._tile
            if level.copy:
                region = self._place(block, level, first, count)
            else:
                region = self._slot(row.window, first % row.slots, row.itemsize, count)
            node = self._operation.group.members[row.peer].node
            posting = Posting(context.number(), self._operation, row, first, end - first, region.nbytes, node)
            context.receives[posting.number] = self._operation.postings[posting.number] = posting
            row.left += [tile_bytes] * (end - first - 1)
            row.left.append(region.nbytes - (end - first - 1) * tile_bytes)
            row.granted = end
            postings.append(posting)
            context.out.append(PostReceive(posting.number, node, region))
        return postings

    def _grant_more(self, level: Level, done: int) -> None:
        """Grant the slots again whose tiles are reduced."""
        operation = self._operation
        for row in level.receives:
            postings = self._grant(row, min(row.block.tiles, done + row.slots))
            if postings:
                frame = MoreGrants(
                    operation.group.number,
                    operation.group.generation,
                    operation.name,
                    operation.use,
                    operation.peers[row.peer].told_attempt,
                    tuple(_as_grant(posting) for posting in postings),
                )
                self._context.out.append(SendFrame(operation.group.members[row.peer].node, frame))


def _as_grant(posting: Posting) -> Grant:
    row = posting.row
    return Grant(posting.number, row.step, row.block.number, posting.first, posting.tiles, b"")
