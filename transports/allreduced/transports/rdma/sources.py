"""Registrations of the memory that is sent from. They open nothing to a peer: their keys are for this end's requests.

Registering pins pages and costs more than sending them does, so memory of an ``mmap`` is registered whole, once per
link, and kept until the mapping is gone. Other memory is registered for one send.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from allreduced.transports.rdma.endpoint import Endpoint
from allreduced.transports.rdma.memory import address_of
from allreduced.transports.rdma.verbs_port import Region, VerbsError


@dataclass(frozen=True, slots=True)
class Source:
    """Registered memory of a send. ``own``: it is registered for that send only, and released with it."""

    region: Region
    own: bool


@dataclass(slots=True)
class _Mapping:
    alive: weakref.ref[mmap.mmap]
    region: Region | None
    """None: it cannot be registered whole."""


class Sources:
    """The registrations of one link. ``failed`` is told of each send whose memory cannot be registered."""

    def __init__(self, endpoint: Endpoint, failed: Callable[[int, VerbsError], None]) -> None:
        self._endpoint = endpoint
        self._failed = failed
        self._mappings: dict[int, _Mapping] = {}
        """By the identity of the mapping, which the weak reference tells from a later one in the same place."""

    def find(self, view: memoryview) -> Source | None:
        """Return the registration of a buffer that is not empty, or None where it cannot be registered."""
        owner = view.obj
        if isinstance(owner, mmap.mmap):
            region = self._mapped(owner)
            if region is not None:
                return Source(region, own=False)
        region = self._register(address_of(view), view.nbytes, last=True)
        return None if region is None else Source(region, own=True)

    def _mapped(self, owner: mmap.mmap) -> Region | None:
        number = id(owner)
        known = self._mappings.get(number)
        if known is None or known.alive() is not owner:
            with memoryview(owner) as whole:
                region = self._register(address_of(whole), whole.nbytes, last=False)
            # Nothing is sent from a mapping that is gone: a send under way holds a view of it.
            known = self._mappings[number] = _Mapping(weakref.ref(owner, partial(_gone, weakref.ref(self))), region)
        return known.region

    def forget(self, alive: weakref.ref[mmap.mmap]) -> None:
        """Give back the registration of a mapping that is gone."""
        for number, known in self._mappings.items():
            if known.alive is alive:
                del self._mappings[number]
                if known.region is not None:
                    self._endpoint.drop(known.region)
                return

    def _register(self, address: int, length: int, *, last: bool) -> Region | None:
        try:
            return self._endpoint.register(address, length, writable=False)
        except VerbsError as error:
            if last:
                self._failed(length, error)
            return None


def _gone(sources: weakref.ref[Sources], alive: weakref.ref[mmap.mmap]) -> None:
    """Tell the registrations of a link that a mapping is gone; this alone keeps no link alive."""
    found = sources()
    if found is not None:
        found.forget(alive)
