"""The nodes of a cluster in the guest: an address of the RDMA device for each, all on one machine."""

from __future__ import annotations

import secrets
from typing import Final, Literal

Family = Literal["ipv4", "ipv6"]
_FORM: Final = {"ipv4": "10.77.0.{}", "ipv6": "[fd77::{}]"}


def host(node: int, family: Family = "ipv4") -> str:
    """Return the address of a node, as it stands in an URL; ``guest/device.sh`` has set it."""
    return _FORM[family].format(node + 1)


class Addresses:
    """A network of ``tests.chaos``: agents at the addresses of the device, which meet at the first one that lives.

    ``environment`` is set for every agent.
    """

    def __init__(self, family: Family = "ipv4", **environment: str) -> None:
        self._family = family
        self._environment = {"ALLREDUCED_SECRET": secrets.token_hex(16), **environment}
        self._listens: dict[int, str] = {}
        self._gone: set[int] = set()

    def prefix(self, node: int) -> tuple[str, ...]:
        """See Network."""
        del node
        return ()

    def arguments(self, node: int) -> tuple[str, ...]:
        """See Network."""
        meeting = next((listen for other, listen in self._listens.items() if other not in (node, *self._gone)), "")
        join = ("--join", meeting.partition("://")[2]) if meeting else ()
        return ("--listen", self._listens.get(node, f"tcp://{host(node, self._family)}:0"), *join)

    def environment(self) -> dict[str, str]:
        """See Network."""
        return self._environment

    def started(self, node: int, listen: str) -> None:
        """See Network."""
        self._gone.discard(node)
        self._listens[node] = listen

    def gone(self, node: int) -> None:
        """See Network."""
        self._gone.add(node)

    def close(self) -> None:
        """See Network."""
