"""What is under way at the driver: postings, sends and kernel jobs. Their memory must not be reused before they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allreduced.daemon.engine.block import Block, Level, ReceiveRow, SendRow
    from allreduced.daemon.engine.operation import Operation


class Posting:
    """A posted receive: tiles ``first … first+tiles-1`` of ``row``; ``left`` of its ``nbytes`` have not landed yet."""

    __slots__ = ("cancelled", "first", "left", "nbytes", "node", "number", "operation", "row", "tiles")

    def __init__(
        self, number: int, operation: Operation, row: ReceiveRow, first: int, tiles: int, nbytes: int, node: str
    ) -> None:
        self.number = number
        self.operation = operation
        self.row = row
        self.first = first
        self.tiles = tiles
        self.nbytes = nbytes
        self.left = nbytes
        self.node = node
        self.cancelled = False


class Fetched:
    """A posted receive for a whole result, which ``node`` has; ``left`` of its ``nbytes`` have not landed yet."""

    __slots__ = ("cancelled", "left", "nbytes", "node", "number", "operation")

    def __init__(self, number: int, operation: Operation, node: str, nbytes: int) -> None:
        self.number = number
        self.operation = operation
        self.node = node
        self.nbytes = self.left = nbytes
        self.cancelled = False


class Sending:
    """A send of tiles ``first … end-1`` of ``row``; ``of_source``: straight from a client's input."""

    __slots__ = ("end", "first", "node", "of_source", "operation", "row")

    def __init__(self, operation: Operation, row: SendRow, first: int, end: int, of_source: bool, node: str) -> None:
        self.operation = operation
        self.row = row
        self.first = first
        self.end = end
        self.of_source = of_source
        self.node = node


class Served:
    """A send of a whole result to ``node``, which lacks it."""

    __slots__ = ("node", "of_source", "operation")

    def __init__(self, operation: Operation, node: str) -> None:
        self.operation = operation
        self.node = node
        self.of_source = False


class Job:
    """A kernel job that makes tiles ``first … end-1`` of ``level``; ``of_source``: it reads clients' inputs.

    Without level it makes the whole result.
    """

    __slots__ = ("block", "end", "first", "level", "of_source", "operation")

    def __init__(
        self, operation: Operation, block: Block | None, level: Level | None, first: int, end: int, of_source: bool
    ) -> None:
        self.operation = operation
        self.block = block
        self.level = level
        self.first = first
        self.end = end
        self.of_source = of_source
