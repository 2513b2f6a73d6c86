"""How the agents of a cluster reach each other, and the plainest way: directly, over loopback."""

from __future__ import annotations

from typing import Protocol


class Network(Protocol):
    """Connects the nodes ``0 …`` of a cluster. Made for one cluster; :meth:`close` removes all of it."""

    def prefix(self, node: int) -> tuple[str, ...]:
        """Return what stands before the command of every process of the node."""

    def arguments(self, node: int) -> tuple[str, ...]:
        """Return the arguments of the node's agent that say where it listens and whom it dials."""

    def environment(self) -> dict[str, str]:
        """Return the variables of the agents."""

    def started(self, node: int, listen: str) -> None:
        """Take note that the node's agent listens at ``listen``."""

    def gone(self, node: int) -> None:
        """Take note that the node's agent was killed."""

    def close(self) -> None:
        """Remove everything."""


class Loopback:
    """Agents meet at the first one that lives. An agent that is started again listens where it did before."""

    def __init__(self) -> None:
        self._listens: dict[int, str] = {}
        self._gone: set[int] = set()

    def prefix(self, node: int) -> tuple[str, ...]:
        """See Network."""
        del node
        return ()

    def arguments(self, node: int) -> tuple[str, ...]:
        """See Network."""
        meeting = next((listen for other, listen in self._listens.items() if other not in (node, *self._gone)), "")
        join = ("--join", meeting.removeprefix("tcp://")) if meeting else ()
        return ("--listen", self._listens.get(node, "tcp://127.0.0.1:0"), *join)

    def environment(self) -> dict[str, str]:
        """See Network."""
        return {}

    def started(self, node: int, listen: str) -> None:
        """See Network."""
        self._gone.discard(node)
        self._listens[node] = listen

    def gone(self, node: int) -> None:
        """See Network."""
        self._gone.add(node)

    def close(self) -> None:
        """See Network."""
