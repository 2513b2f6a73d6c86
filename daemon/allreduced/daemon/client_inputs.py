"""The operations of one client, and where their inputs are: in the slab, in an arena of its own, or on their way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from allreduced.core.errors import AllReducedError, InvalidArgument, ProtocolError
from allreduced.daemon.arena_table import ArenaTable
from allreduced.daemon.engine.region import Region
from allreduced.daemon.slab import Slab
from allreduced.daemon.submission import Submission
from allreduced.protocol import local


@dataclass(slots=True, eq=False)
class ClientOperation:
    """A submit of the client. ``source``: its input; ``uploaded``: bytes of it that came so far, None once complete.

    ``call``: its number among the submits of the client in its group.
    """

    message: local.Submit
    deadline_at: float
    submission: Submission | None = None
    source: Region | None = None
    in_slab: bool = False
    private: bool = False
    uploaded: int | None = None
    refused: AllReducedError | None = None
    """Why this agent cannot take it; the engine hears of it all the same, for it counts."""
    call: int = 0
    streams: bool = False
    """Its input or its result travels in pieces."""


class ClientInputs:
    """Finds, makes and frees the memory of one client's inputs. ``uid``: whose limits they count for."""

    def __init__(self, client: int, uid: int, arenas: ArenaTable, slab: Slab) -> None:
        self._client = client
        self._uid = uid
        self._arenas = arenas
        self._slab = slab

    def store(self, operation: ClientOperation, payload: bytes | memoryview) -> None:
        """Keep an input that came inside its message."""
        operation.source = self._slab.store(payload, self._uid)
        operation.in_slab = True

    def hold(self, operation: ClientOperation, nbytes: int) -> None:
        """Use an input that lies in an arena of the client.

        :raises InvalidArgument: the arena is not the client's, or the input does not lie within it.
        """
        message, arenas = operation.message, self._arenas
        arena, offset = message.arena, message.offset
        if not arenas.owns(self._client, arena):
            raise InvalidArgument(f"arena {arena} is not one of this client's")
        if offset + nbytes > arenas.nbytes(arena):
            raise InvalidArgument(
                f"{nbytes} bytes at offset {offset} do not lie within arena {arena} of {arenas.nbytes(arena)} bytes"
            )
        arenas.hold(arena)
        operation.source = Region(arena, offset, nbytes)

    def make_room(
        self, operation: ClientOperation, nbytes: int, made: Callable[[AllReducedError | None], None]
    ) -> None:
        """Make room for an input that comes in pieces; ``made`` is called once it is there, or why it cannot be.

        :raises LimitExceeded: there is none to be had.
        """
        arenas = self._arenas

        def created(arena: int, error: AllReducedError | None) -> None:
            if error is None:
                arenas.hold(arena)
                operation.source = Region(arena, 0, nbytes)
            made(error)

        arenas.create_input(self._client, nbytes, created, shared=False, user=self._uid)
        operation.uploaded = 0
        operation.private = True

    def take_piece(self, operation: ClientOperation, message: local.Upload) -> bool:
        """Take the next piece of an input; return True if it was the last one.

        :raises ProtocolError: there was none to come, or it is too long.
        """
        done, source = operation.uploaded, operation.source
        if done is None or source is None:
            raise ProtocolError(f"request {message.request} has its input already")
        data = message.data
        if done + len(data) > source.nbytes:
            raise ProtocolError(f"request {message.request} has {source.nbytes} bytes of input, more came")
        with self._arenas.view(Region(source.buffer, done, len(data))) as view:
            view[:] = data
        operation.uploaded = done + len(data)
        return operation.uploaded == source.nbytes

    def free(self, operation: ClientOperation) -> None:
        """Let go of an input that nothing reads any more."""
        source, operation.source = operation.source, None
        if source is None:
            return
        if operation.in_slab:
            self._slab.free(source)
            return
        if operation.private:
            self._arenas.drop(source.buffer)
        self._arenas.unhold(source.buffer)
