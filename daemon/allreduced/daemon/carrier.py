"""What carries the data of links, under addresses that do not tell it.

Agents dial each other at ``tcp://host:port`` whatever carries their data, so that all of them, also those of another
opinion or version, can name each other. The scheme of the chosen transport is put in and taken out here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Final

from allreduced.core.errors import AllReducedError
from allreduced.transports.base import Link, LinkAccepted, LinkEvents, LinkOptions, Listener, Transport

logger = logging.getLogger("allreduced.peers")

TCP: Final = "tcp"


@dataclass(frozen=True, slots=True)
class Carriage:
    """What was decided at start, by ``rdma_use``. ``scheme``: of the transport to use.

    ``reason``: why it is TCP though RDMA was wanted, or empty. ``hint``: what to do about that; empty where this is
    just a machine without RDMA, which is worth no warning.
    """

    scheme: str
    reason: str = ""
    hint: str = ""


def carrier(link: Link) -> tuple[str, str]:
    """Return the scheme of the transport that carries the link's data, and what is to be told about it.

    The second is the device and its port, or why it is TCP though RDMA was wanted; empty where neither is to be said.
    """
    named, _, path = link.data_path.partition(" ")
    scheme = named or link.remote_address.partition("://")[0]
    return scheme, link.fallback_reason or path


def carried(find: Callable[[str], Transport], carriage: Carriage) -> Callable[[str], Transport]:
    """Return how transports are found: as ``find`` does, but under ``tcp`` the one that was decided on."""

    def found(scheme: str) -> Transport:
        if scheme != TCP or (carriage.scheme == TCP and not carriage.reason):
            return find(scheme)
        if scheme not in made:
            made[scheme] = _Carried(find(carriage.scheme), carriage)
        return made[scheme]

    made: dict[str, Transport] = {}
    return found


class _Carried(Transport):
    """The chosen transport, under addresses ``tcp://host:port``."""

    scheme: ClassVar[str] = TCP

    def __init__(self, inner: Transport, carriage: Carriage) -> None:
        self._inner = inner
        self._carriage = carriage
        self._warned = not carriage.hint

    async def listen(self, address: str, accepted: LinkAccepted, options: LinkOptions) -> Listener:
        def named(link: Link) -> LinkEvents:
            self._name(link)
            return accepted(link)

        with self._outside():
            return _CarriedListener(await self._inner.listen(self._inside(address), named, options))

    async def connect(self, address: str, events: LinkEvents, options: LinkOptions) -> Link:
        with self._outside():
            link = await self._inner.connect(self._inside(address), events, options)
        self._name(link)
        return link

    def _inside(self, address: str) -> str:
        return f"{self._inner.scheme}://{address.partition('://')[2]}"

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Let errors name addresses as they were given."""
        try:
            yield
        except AllReducedError as error:
            error.message = error.message.replace(f"{self._inner.scheme}://", f"{TCP}://")
            raise

    def _name(self, link: Link) -> None:
        link.local_address = outside(link.local_address)
        link.remote_address = outside(link.remote_address)
        if self._carriage.reason:
            link.fallback_reason = self._carriage.reason
            if not self._warned:  # once, and only in an agent that has peers
                self._warned = True
                logger.warning("event=rdma_not_used reason=%r hint=%r", self._carriage.reason, self._carriage.hint)


class _CarriedListener(Listener):
    """A listener whose address others can dial, whatever they carry data by."""

    def __init__(self, inner: Listener) -> None:
        self._inner = inner
        self.address = outside(inner.address)

    async def close(self) -> None:
        await self._inner.close()


def outside(address: str) -> str:
    """Return an address of whatever transport as ``tcp://host:port``."""
    return f"{TCP}://{address.partition('://')[2]}"
