"""Limits of the local plane."""

from __future__ import annotations

from dataclasses import dataclass

from allreduced.core.errors import LimitExceeded
from allreduced.daemon.users import User


@dataclass(frozen=True, slots=True)
class LocalLimits:
    """What clients of one agent may ask for. Times in seconds; every field is a key of the section ``limits``."""

    clients: int = 1024
    """Connections at once."""
    clients_per_user: int = 1024
    """The same, of one user."""
    requests: int = 4096
    """Requests in flight of one client."""
    requests_per_user: int = 1 << 16
    """Requests in flight of all clients of one user."""
    groups: int = 256
    """Groups that one client has, or waits for, a rank in."""
    groups_per_user: int = 2048
    """The same, of all clients of one user together."""
    streams: int = 1024
    """Large tensors of one client that travel inside messages at the same time, in either direction."""
    inline: int = 8 << 10
    """Bytes of a tensor that travels inside its submit and done messages at most."""
    inline_bytes: int = 96 << 20
    """Bytes that all small inputs in flight may take together."""
    outgoing_bytes: int = 64 << 20
    """Bytes that wait for a client that does not read, before it is dropped."""
    outgoing_messages: int = 1 << 16
    """Messages that wait for a client that does not read, before it is dropped."""
    hello_timeout: float = 5.0
    """Time for a new connection to say hello."""


def check_requests(limits: LocalLimits, own: int, user: User) -> None:
    """Check that there is room for one more request. ``own``: those of the process that are in flight.

    :raises LimitExceeded: there is not.
    """
    whole = f"the processes of uid {user.uid}"
    _check(
        "requests of {} are in flight",
        "wait for some of them first",
        (
            ("limits.requests", limits.requests, own, "this process"),
            ("limits.requests_per_user", limits.requests_per_user, user.requests, whole),
        ),
    )


def check_groups(limits: LocalLimits, own: int, user: User) -> None:
    """Check that there is room for one more group. ``own``: those that the process has or waits for a rank in.

    :raises LimitExceeded: there is not.
    """
    whole = f"the processes of uid {user.uid}"
    _check(
        "groups have ranks of {}, or are waited for",
        "close some of their communicators first",
        (
            ("limits.groups", limits.groups, own, "this process"),
            ("limits.groups_per_user", limits.groups_per_user, user.groups, whole),
        ),
    )


def _check(what: str, mends: str, limits: tuple[tuple[str, int, int, str], ...]) -> None:
    """Refuse where one of the limits (name, most, count, whose) is reached. ``what``: such as ``things of {}``."""
    for limit, most, count, whose in limits:
        if count >= most:
            raise LimitExceeded(
                f"{most} {what.format(whose)}, the most that the agent allows ({limit})",
                limit=limit,
                hint=f"{mends}, or raise {limit}",
            )
