"""What a way to find other agents must do, and what it finds: the contract of ``discovery``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from allreduced.daemon.peer_link import Target
from allreduced.transports.base import Listener

Listen: TypeAlias = "Callable[[str], Awaitable[Listener]]"
"""Opens a listening address, or raises ConfigError."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Whom this agent dials: all of them, each time.

    ``own``: where others find this agent, as far as the way of finding tells; empty where it does not. ``problem``: why
    nobody, or not everybody, is found at present, in words; empty where all is well.
    """

    targets: frozenset[Target] = frozenset()
    own: str = ""
    problem: str = ""


Changed: TypeAlias = "Callable[[Listing], None]"
"""Takes the listing that holds from now on."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where this agent listens (None: nowhere) and whom it dials.

    ``taken``: the address of this machine where the agents meet and something listens already, so what answers must
    be an agent; to be listened at when that is gone. Empty where that is not so. ``listing``: the first one, of a way
    whose listing changes; these are dialled too.
    """

    listener: Listener | None
    targets: tuple[Target, ...] = ()
    taken: str = ""
    listing: Listing = Listing()


class Discovery(Protocol):
    """One way to find agents. A further one (a coordination service) implements this, and ``discovery`` chooses it."""

    async def find(self, listen: Listen) -> Found:
        """Open this agent's listening address by ``listen``, if it needs one, and return whom to dial.

        Takes a few seconds at most. That nobody is found is no error.

        :raises ConfigError: an address cannot be used.
        """

    async def follow(self, advertised: str, changed: Changed) -> None:
        """Call ``changed`` whenever the listing is another one, until cancelled; return where it never changes.

        Called after :meth:`find`, once. ``advertised``: where others may dial this agent, for ways that publish it;
        empty where that is not known. A failure is told in the listing, and is no reason to end.
        """
