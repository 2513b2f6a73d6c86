"""The interpreter: runs one member's program tile by tile.

Every tile of the tensor has one place in the result region. What a member needs of it before it is final is kept in
that same place (or is a client's input, where there is only one): a final value that arrives there later was made of
what was sent from there, which ``schedules.verify`` proves. A reduction in place waits until the tile is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from allreduced.core.dtypes import DType
from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.actions import PostReceive, Reduce, Send, SendFrame
from allreduced.daemon.engine.block import Block, Level, Progress, ReceiveRow, SendRow
from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.flights import Job, Posting, Sending
from allreduced.daemon.engine.free_list import aligned
from allreduced.daemon.engine.operation import Operation
from allreduced.daemon.engine.program import BlockPlan
from allreduced.daemon.engine.region import Region
from allreduced.protocol.peer import Grant, MoreGrants
from allreduced.schedules.schedule import block_bounds


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
        dtype: DType,
        reduction: Reduction,
        count: int,
        sources: Sequence[Region],
        program: Sequence[BlockPlan],
    ) -> None:
        group = operation.group
        self._context = context
        self._operation = operation
        self._dtype = dtype
        self._itemsize = itemsize = dtype.itemsize
        self._reduction = reduction
        self._partial = Reduction.SUM if reduction is Reduction.MEAN else reduction
        self._divisor = group.size if reduction is Reduction.MEAN else 1
        self._sources = tuple(sources)
        self._tile = tile = max(1, group.tile_bytes // itemsize) * itemsize
        self.nbytes = count * itemsize
        window = context.limits.window_tiles
        bounds = (0, count) if len(program) == 1 else block_bounds(count, len(program))
        self._blocks: list[Block] = []
        for number, plan in enumerate(program):
            start, end = bounds[number] * itemsize, bounds[number + 1] * itemsize
            if start != end:
                self._blocks.append(Block(number, plan, start, end - start, tile, window, len(sources)))
        self._block_of = {block.number: block for block in self._blocks}
        self._unfinished = len(self._blocks)
        self._rows_left = sum(len(block.sends) for block in self._blocks)
        self._source_rows_left = (
            sum(len(block.levels[0].sends) for block in self._blocks) if len(self._sources) == 1 else 0
        )
        self.scratch_bytes = self._lay_out_windows()
        self._result = Region(-1, 0, 0)
        self._scratch = Region(-1, 0, 0)

    def _lay_out_windows(self) -> int:
        offset = 0
        for block in self._blocks:
            for level in block.levels[1:]:
                if level.copy:
                    continue
                size = aligned(min(level.receives[0].slots * self._tile, block.end - block.offset))
                for row in level.receives:
                    row.window = offset
                    offset += size
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
        tile, left = self._tile, row.left
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

    def _reduce(self, block: Block, level: Level) -> None:
        """Issue the reductions of a level that have all their inputs."""
        from_inputs = level.index == 0 or (level.index == 1 and not block.levels[0].in_place)
        if level.index:
            before = block.levels[level.index - 1]
            limit = before.progress.done
            for row in level.receives:
                limit = min(limit, row.arrived)
            if before.in_place:
                for send in before.sends:
                    limit = min(limit, send.sent.done)
        elif level.final:
            limit = block.tiles
        else:
            limit = max(send.granted for send in level.sends)
        first = level.issued
        if first >= limit:
            return
        slots = level.receives[0].slots if level.receives else block.tiles
        reduction = self._reduction if level.final else self._partial
        divisor = self._divisor if level.final else 1
        operation, context, result = self._operation, self._context, self._result
        while first < limit:
            # Slots are used in turns: a range that wraps around is two jobs.
            end = min(limit, first - first % slots + slots)
            low = block.offset + first * self._tile
            nbytes = min(block.offset + end * self._tile, block.end) - low
            target = Region(result.buffer, result.offset + low, nbytes)
            if from_inputs:
                sources = [Region(source.buffer, source.offset + low, nbytes) for source in self._sources]
                operation.source_readers += 1
            else:
                sources = [target]
            if level.receives:
                slot = self._scratch.offset + first % slots * self._tile
                sources += [Region(self._scratch.buffer, slot + row.window, nbytes) for row in level.receives]
            number = context.number()
            context.jobs[number] = Job(operation, block, level, first, end, from_inputs)
            operation.outstanding += 1
            context.out.append(
                Reduce(
                    number,
                    self._dtype,
                    reduction,
                    divisor,
                    nbytes // self._itemsize,
                    tuple(sources),
                    target,
                    operation.priority,
                )
            )
            level.issued = first = end

    def _send(self, block: Block, row: SendRow) -> None:
        """Send what is there of a row and granted."""
        operation, context = self._operation, self._context
        level = row.level
        of_source = level.index == 0 and len(self._sources) == 1
        available = block.tiles if of_source else level.progress.done
        base = self._sources[0] if of_source else self._result
        while row.next < available and row.grants:
            first, granted_end, token = row.grants[0]
            end = min(available, granted_end)
            low = block.offset + row.next * self._tile
            nbytes = min(block.offset + end * self._tile, block.end) - low
            number = context.number()
            context.sends[number] = operation.sendings[number] = Sending(operation, row, row.next, end, of_source)
            operation.outstanding += 1
            operation.source_readers += of_source
            context.out.append(
                Send(
                    number,
                    operation.group.members[row.peer].node,
                    token,
                    (row.next - first) * self._tile,
                    Region(base.buffer, base.offset + low, nbytes),
                    operation.peers[row.peer].tag,
                    operation.priority,
                )
            )
            row.next = end
            if end == granted_end:
                row.grants.popleft()

    def _grant(self, row: ReceiveRow, limit: int) -> list[Posting]:
        """Post receives for the tiles of ``row`` from the last granted one to ``limit``."""
        postings = []
        block, tile, context = row.block, self._tile, self._context
        while row.granted < limit:
            first = row.granted
            end = min(limit, first - first % row.slots + row.slots)
            low = block.offset + first * tile
            nbytes = min(block.offset + end * tile, block.end) - low
            if row.window < 0:
                region = Region(self._result.buffer, self._result.offset + low, nbytes)
            else:
                slot = row.window + first % row.slots * tile
                region = Region(self._scratch.buffer, self._scratch.offset + slot, nbytes)
            posting = Posting(context.number(), self._operation, row, first, end - first, nbytes)
            context.receives[posting.number] = self._operation.postings[posting.number] = posting
            row.left += [tile] * (end - first - 1)
            row.left.append(nbytes - (end - first - 1) * tile)
            row.granted = end
            postings.append(posting)
            node = self._operation.group.members[row.peer].node
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
