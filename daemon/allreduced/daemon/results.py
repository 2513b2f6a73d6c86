"""What one client is given of results: inside messages, under leases in result arenas, or in pieces."""

from __future__ import annotations

from functools import lru_cache

from allreduced.daemon.arena_table import ArenaTable
from allreduced.daemon.client_connection import ClientConnection, Pieces
from allreduced.daemon.engine.events import LeasesReturned
from allreduced.daemon.engine.region import Region
from allreduced.daemon.ports import EventSink, Result
from allreduced.protocol import local
from allreduced.protocol.templates import DoneTemplate


class Results:
    """Sends results to one client, and knows which result arenas it has.

    ``inline_limit``: bytes of a result that travels inside its message at most.
    """

    def __init__(
        self, client: int, connection: ClientConnection, arenas: ArenaTable, sink: EventSink, *, inline_limit: int
    ) -> None:
        self._client = client
        self._connection = connection
        self._arenas = arenas
        self._sink = sink
        self._inline_limit = inline_limit
        self._shown: set[int] = set()
        self._template = lru_cache(maxsize=16)(DoneTemplate)

    def give(self, request: int, result: Result, *, by_arena: bool) -> None:
        """Send Done, with the result or where it is. ``by_arena`` false: the client wants the bytes themselves.

        ``result.data`` is copied before this returns. A lease that the client does not need goes back.
        """
        data, arena, offset, nbytes, lease, participants, algorithm, elapsed = result
        payload: bytes | None = None
        pieces: Pieces | None = None
        if data is not None:
            if nbytes <= self._inline_limit:
                payload = bytes(data)
            else:
                pieces = self._pieces(request, memoryview(bytes(data)), 0)
        elif arena >= 0 and by_arena:
            self._show(arena)
            template = self._template(participants, algorithm)
            self._connection.send_encoded(template.encode(request, None, arena, offset, nbytes, lease, False, elapsed))
            return
        elif arena >= 0:
            view = self._arenas.view(Region(arena, offset, nbytes))
            if nbytes <= self._inline_limit:
                payload = bytes(view)
                view.release()
                self.return_lease(lease)
            else:
                pieces = self._pieces(request, view, lease)
        template = self._template(participants, algorithm)
        self._connection.send_encoded(template.encode(request, payload, -1, 0, nbytes, 0, pieces is not None, elapsed))
        if pieces is not None:
            self._connection.stream(pieces)

    def return_lease(self, lease: int) -> None:
        """Give a lease back for the client, which does not read the result; 0 is none."""
        if lease:
            self._sink.engine_event(LeasesReturned(self._client, (lease,)))

    def arena_gone(self, arena: int) -> None:
        """Send ResultArenaGone if the client has the arena."""
        if arena in self._shown:
            self._shown.discard(arena)
            self._connection.send(local.ResultArenaGone(arena))

    def _show(self, arena: int) -> None:
        if arena in self._shown:
            return
        descriptor = self._arenas.descriptor(arena)
        self._shown.add(arena)
        nbytes = self._arenas.nbytes(arena)
        self._connection.send(local.ResultArena(arena, self._arenas.group_of(arena), nbytes), descriptor)

    def _pieces(self, request: int, view: memoryview, lease: int) -> Pieces:
        """Make the pieces of a result; the lease is back as soon as the last one is made."""
        try:
            with view:
                for begin in range(0, len(view), local.CHUNK):
                    piece = bytes(view[begin : begin + local.CHUNK])
                    yield local.Download(request, piece, begin + local.CHUNK >= len(view))
        finally:
            self.return_lease(lease)
