"""What one end of a link holds of a device, made together and given back together."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import ExitStack
from typing import Final

from allreduced.transports.rdma import wire
from allreduced.transports.rdma.memory import Slots
from allreduced.transports.rdma.options import RdmaOptions
from allreduced.transports.rdma.verbs_port import (
    Closable,
    LocalPort,
    QueuePair,
    ReceiveRequest,
    Region,
    Verbs,
    VerbsError,
)

_log = logging.getLogger("allreduced.transports.rdma")

SEND_SLOTS: Final = 32
"""Small messages per flow that may wait for their completion."""
SEND_DEPTH: Final = 128
"""Requests of a send queue."""
MOST_PINNED: Final = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
"""Bytes of one registration at most: a kernel that is asked for more looks for processes to kill."""
MAX_INLINE: Final = 128
"""Bytes of a message that are to travel inside its request; the device may grant less."""


class Endpoint:
    """A context, a protection domain, two completion queues, and a queue pair per flow with its receive requests.

    The domain is this link's own, so a key that one peer got opens nothing of another.

    :raises VerbsError: the device is gone or refuses, or one of its limits or that for locked memory is reached.
    """

    pairs: list[QueuePair]

    def __init__(self, verbs: Verbs, local: LocalPort, options: RdmaOptions, flows: int) -> None:
        self.local = local
        self.depth = options.depth
        self.small = options.small
        self._regions: set[Region] = set()
        with ExitStack() as undo:

            def kept(made: Closable) -> None:
                undo.callback(_close, made)

            self.device = verbs.open(local.device)
            kept(self.device)
            self.domain = self.device.create_domain()
            kept(self.domain)
            self.sends = self.device.create_queue(flows * (SEND_DEPTH + 1))
            kept(self.sends)
            self.receives = self.device.create_queue(flows * (options.depth + 1))
            kept(self.receives)
            self.out = Slots(self.domain, flows * SEND_SLOTS, wire.HEADER + options.small)
            kept(self.out)
            self.into = Slots(self.domain, flows * options.depth, wire.HEADER + options.small)
            kept(self.into)
            self.pairs = []
            for flow in range(flows):
                pair = self.domain.create_pair(
                    self.sends,
                    self.receives,
                    send_depth=SEND_DEPTH,
                    receive_depth=options.depth,
                    max_inline=MAX_INLINE,
                    port=local.port,
                )
                kept(pair)
                self.pairs.append(pair)
                first = flow * options.depth
                pair.post_receive([self.receive_request(slot) for slot in range(first, first + options.depth)])
            self._undo = undo.pop_all()
        self._open = True

    def receive_request(self, slot: int) -> ReceiveRequest:
        """Return the request that lets the next message of the peer into a slot."""
        return ReceiveRequest(slot, self.into.address(slot), self.into.size, self.into.key)

    def register(self, address: int, length: int, *, writable: bool) -> Region:
        """Register memory of the owner: ``writable`` for the peer, else to be sent from.

        :raises VerbsError: it cannot be registered.
        """
        if length > MOST_PINNED:
            raise VerbsError(f"{length} bytes would pin more than half of the memory of this machine", errno.ENOMEM)
        region = self.domain.register(address, length, local_write=writable, remote_write=writable)
        self._regions.add(region)
        return region

    def release(self, region: Region) -> None:
        """Give a region back; its keys are worth nothing and its memory is not touched when this returns.

        :raises VerbsError: the device refuses; only ``close`` frees the memory then.
        """
        region.close()
        self._regions.discard(region)

    def drop(self, region: Region) -> None:
        """Give a region back that nothing uses, where nothing may be raised. Does nothing after ``close``."""
        if region in self._regions:
            self._regions.discard(region)
            _close(region)

    def close(self) -> None:
        """Give everything back at once: queue pairs first, so that nothing touches any memory afterwards."""
        if self._open:
            self._open = False
            for pair in self.pairs:
                _close(pair)
            for region in self._regions:
                _close(region)
            self._regions.clear()
            self._undo.close()


def _close(what: Closable) -> None:
    try:
        what.close()
    except VerbsError as error:
        # A device that was removed refuses this, and has let go of everything already.
        _log.warning("event=rdma_close_failed error=%r", str(error))
