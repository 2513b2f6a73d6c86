"""Who may attach to an agent: decided from what the kernel says about the process at the other end of the socket."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from allreduced.core.errors import AuthenticationError, ConfigError
from allreduced.daemon.settings import Access as AccessSettings

EVERYBODY: Final = "*"
"""In ``access.users``: every user of the machine."""

ROOT: Final = 0

_SO_PEERGROUPS: Final = 59
"""Linux 4.13; not among the names of ``socket``."""

_MOST_GROUPS_BYTES: Final = 1024
"""What ``getsockopt`` of Python takes: 256 groups. Who has more is known by the primary one only."""

_SHOWN: Final = 8
"""Names that a refusal lists of each kind."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The process at the other end of a Unix socket, as it was when it connected.

    ``pid`` is 0 for a process of a container of its own. ``groups``: the primary one, then the supplementary ones as
    far as the kernel tells them.
    """

    pid: int
    uid: int
    groups: tuple[int, ...]


def credentials_of(sock: socket.socket) -> Credentials:
    """Return who connected. Does not block."""
    form = struct.Struct("3i")
    pid, uid, gid = form.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size))
    try:
        told = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_GROUPS_BYTES)
    except OSError:  # an older kernel, or more groups than fit
        told = b""
    others = struct.unpack(f"{len(told) // 4}I", told[: len(told) // 4 * 4])
    return Credentials(pid, uid & 0xFFFFFFFF, (gid & 0xFFFFFFFF, *(group for group in others if group != gid)))


@dataclass(frozen=True, slots=True)
class Access:
    """Who may attach, and who may only look.

    ``owner``: the uid that the agent runs as, which may always attach. ``users`` and ``groups``: uids and gids that
    may. ``observers``: uids that may ask for the status even where they may not attach. ``told``: what is allowed, in
    the words of the settings.
    """

    owner: int
    users: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()
    everybody: bool = False
    observers: frozenset[int] = frozenset({ROOT})
    told: str = "access.users and access.groups allow nobody else"

    def may_attach(self, who: Credentials) -> bool:
        """Return whether the process may join groups."""
        return (
            self.everybody or who.uid == self.owner or who.uid in self.users or not self.groups.isdisjoint(who.groups)
        )

    def may_look(self, who: Credentials) -> bool:
        """Return whether the process may ask for the status."""
        return self.may_attach(who) or who.uid in self.observers

    def refusal(self, who: Credentials) -> AuthenticationError:
        """Return the error for a process that may not attach: who it is, what is allowed, which settings say so."""
        groups = ", ".join(str(group) for group in who.groups[:_SHOWN])
        more = ", …" if len(who.groups) > _SHOWN else ""
        return AuthenticationError(
            f"uid {who.uid} (gid {groups}{more}) may not attach to this agent, which runs as uid {self.owner}: "
            f"{self.told}",
            hint="add this user to access.users, or one of its groups to access.groups, in the agent's configuration,"
            " or start an agent of your own",
        )

    def looks_only(self, who: Credentials) -> AuthenticationError:
        """Return the error for a process that may ask for the status and asked for something else."""
        return AuthenticationError(
            f"uid {who.uid} may ask this agent for its status, and for nothing else: {self.told}",
            hint="become the user that the agent runs as, or add this one to access.users",
        )


def own_uid_only() -> Access:
    """Return the default: the agent's own user, and root to look."""
    return Access(os.geteuid())


def access_from(settings: AccessSettings, owner: int) -> Access:
    """Return who may attach by the settings of an agent that runs as the uid ``owner``. May block: it looks names up.

    :raises ConfigError: a name is not known on this machine.
    """
    names = [name for name in settings.users if name != EVERYBODY]
    users = [_number("access.users", name, _uid_of) for name in names]
    groups = [_number("access.groups", name, gid_of) for name in settings.groups]
    everybody = EVERYBODY in settings.users
    told = f"access.users allows {'everybody' if everybody else _listed(settings.users)}, "
    return Access(
        owner,
        frozenset(users),
        frozenset(groups),
        everybody,
        told=f"{told}access.groups allows {_listed(settings.groups)}",
    )


def socket_mode(settings: AccessSettings) -> int:
    """Return the permissions of the socket's file: as it is set, else just wide enough for those who may attach."""
    if settings.socket_mode:
        return int(settings.socket_mode, 8)
    if settings.socket_group:
        return 0o660
    return 0o666 if settings.users or settings.groups else 0o600


def socket_group(settings: AccessSettings) -> int:
    """Return the gid that the socket's file gets, -1 to leave it. Looks the name up, which may block.

    :raises ConfigError: the group is not known on this machine.
    """
    name = settings.socket_group
    return _number("access.socket_group", name, gid_of) if name else -1


def gid_of(name: str) -> int:
    """Return the gid of a group.

    :raises KeyError: there is none of this name.
    """
    return grp.getgrnam(name).gr_gid


def _uid_of(name: str) -> int:
    return pwd.getpwnam(name).pw_uid


def _number(key: str, name: str, look_up: Callable[[str], int]) -> int:
    if name.isascii() and name.isdigit() and len(name) <= 10:
        return int(name)
    try:
        return look_up(name)
    except KeyError:
        what = "user" if key == "access.users" else "group"
        raise ConfigError(
            f"{key} names {name!r}, and there is no such {what} on this machine",
            path=key,
            hint=f"write a {what} that `getent {'passwd' if what == 'user' else 'group'}` lists, or a number",
        ) from None


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "nobody"
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
