"""Leases: results that clients still read."""

from __future__ import annotations

from allreduced.daemon.engine.context import Context
from allreduced.daemon.engine.memory import Allocation, Memory


class Holder:
    """A result's memory and how many still use it: the operation itself and each lease."""

    __slots__ = ("allocation", "users")

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation
        self.users = 1


class Leases:
    """All leases of this node's clients."""

    def __init__(self, context: Context, memory: Memory) -> None:
        self._context = context
        self._memory = memory
        self._by_client: dict[int, dict[int, Holder]] = {}
        self._bytes: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the results that clients hold, counted once per lease."""
        return sum(self._bytes.values())

    def over_quota(self, client: int, nbytes: int) -> tuple[str, int, int] | None:
        """Return (setting, held, limit) where a result of ``nbytes`` more is too much for the client, else None.

        Who holds nothing may have one result of any size.
        """
        limits = self._context.limits
        held = self._bytes.get(client, 0)
        if held and held + nbytes > limits.lease_bytes:
            return ("limits.lease_bytes", held, limits.lease_bytes)
        count = len(self._by_client.get(client, ()))
        return ("limits.leases", count, limits.leases) if count >= limits.leases else None

    def grant(self, client: int, holder: Holder) -> int:
        """Give the client a lease on the result; returns its number."""
        number = self._context.number()
        holder.users += 1
        self._by_client.setdefault(client, {})[number] = holder
        self._bytes[client] = self._bytes.get(client, 0) + holder.allocation.nbytes
        return number

    def give_back(self, client: int, leases: tuple[int, ...]) -> None:
        """End leases of the client. Unknown ones are ignored."""
        held = self._by_client.get(client)
        if held is None:
            return
        for number in leases:
            holder = held.pop(number, None)
            if holder is not None:
                self._bytes[client] -= holder.allocation.nbytes
                self.drop(holder)
        if not held:
            del self._by_client[client], self._bytes[client]

    def client_gone(self, client: int) -> None:
        """End all leases of the client."""
        self.give_back(client, tuple(self._by_client.get(client, ())))

    def drop(self, holder: Holder) -> None:
        """End one use of a result; the last one frees its memory."""
        holder.users -= 1
        if holder.users == 0:
            self._memory.release(holder.allocation)

    def snapshot(self) -> dict[int, dict[str, int]]:
        """Return how many leases and bytes each client holds."""
        return {client: {"leases": len(held), "bytes": self._bytes[client]} for client, held in self._by_client.items()}
