"""What the processes of each user take of the local plane right now, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class User:
    """One user's share. ``clients``: open connections; ``requests``: operations and joins that are in flight.

    ``groups``: those that each of its clients has, or waits for, a rank in.
    """

    uid: int
    clients: int = 0
    requests: int = 0
    groups: int = 0


class Users:
    """All users that have something here. One that has nothing any more is forgotten."""

    def __init__(self) -> None:
        self._users: dict[int, User] = {}
        self.clients = 0
        """Open connections of all users."""

    def __len__(self) -> int:
        return len(self._users)

    def get(self, uid: int) -> User:
        """Return the counts of a user, which are kept while something of it is counted."""
        return self._users.get(uid) or User(uid)

    def connected(self, uid: int) -> User:
        """Count a connection more, and return its user's counts, to be used until it is over."""
        user = self._users.setdefault(uid, User(uid))
        user.clients += 1
        self.clients += 1
        return user

    def disconnected(self, user: User) -> None:
        """Count a connection less."""
        user.clients -= 1
        self.clients -= 1
        self.settle(user)

    def settle(self, user: User) -> None:
        """Forget the user if nothing of it is left."""
        if not user.clients and not user.requests and not user.groups:
            self._users.pop(user.uid, None)
