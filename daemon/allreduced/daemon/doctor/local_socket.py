"""The socket through which processes of this node reach their agent."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from allreduced.core.addresses import parse_socket
from allreduced.daemon.doctor.finding import Finding, note, ok, problem

SUBJECT = "socket"

_TRIES, _PAUSE = 20, 0.05
"""How often it is tried to get into a full queue, and seconds between two tries."""


@dataclass(frozen=True, slots=True)
class SocketFacts:
    """What is at the place of the socket.

    ``kind``: ``abstract``, ``socket``, ``other`` (something else is there), ``nothing``, ``no_folder`` or ``hidden``
    (this user may not look). ``answer``: what connecting gave: 0, or an errno. ``mode``: permission bits; ``uid`` and
    ``gid``: whose the socket is. ``may_make``: whether this user could make a socket there.
    """

    name: str
    kind: str
    answer: int
    mode: int = 0
    uid: int = 0
    gid: int = 0
    may_make: bool = True


def socket_facts(name: str) -> SocketFacts:
    """Look at the place ``name``, a path or ``@name``, and connect to it once; nothing is sent.

    :raises ConfigError: it cannot be the name of a socket.
    """
    address = parse_socket(name, path="agent.socket")
    answer = _connect(address.sockaddr)
    if address.abstract:
        return SocketFacts(name, "abstract", answer)
    folder = Path(name).parent
    may_make = os.access(folder if folder.exists() else folder.parent, os.W_OK | os.X_OK)
    try:
        found = os.lstat(name)
    except FileNotFoundError:
        kind = "nothing" if folder.exists() else "no_folder"
        return SocketFacts(name, kind, answer, may_make=may_make)
    except OSError:
        return SocketFacts(name, "hidden", answer, may_make=may_make)
    kind = "socket" if stat.S_ISSOCK(found.st_mode) else "other"
    return SocketFacts(name, kind, answer, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, may_make)


def judge_socket(facts: SocketFacts) -> Iterator[Finding]:
    """Yield what is to be said about the socket. Pure."""
    start = "start the agent: systemctl start allreduced, or allreduced agent"
    match facts.kind:
        case "other":
            yield problem(SUBJECT, f"{facts.name} exists and is not a socket", f"look at it, then: mv {facts.name} …")
            return
        case "hidden":
            yield problem(
                SUBJECT,
                f"this user may not look at {facts.name}",
                f"join the group of {Path(facts.name).parent} (usermod -aG), or name another socket",
            )
            return
        case _:
            pass
    if facts.answer == 0:
        whose = "" if facts.kind == "abstract" else f" (mode {facts.mode:03o}, uid {facts.uid}, gid {facts.gid})"
        yield ok(SUBJECT, f"an agent answers at {facts.name}{whose}")
    elif facts.answer in (errno.EACCES, errno.EPERM):
        to_group = facts.mode & 0o060 == 0o060
        yield problem(
            SUBJECT,
            f"this user may not use {facts.name}: mode {facts.mode:03o}, uid {facts.uid}, gid {facts.gid}",
            f"sudo usermod -aG $(stat -c %G {facts.name}) $USER, and log in anew"
            if to_group
            else "let the user in: access.users in the agent's settings, then systemctl reload allreduced",
        )
    elif facts.answer == errno.EAGAIN:
        yield problem(
            SUBJECT,
            f"the agent at {facts.name} takes no connections: its queue is full",
            "it hangs, is stopped, or somebody floods it: see its log (journalctl -u allreduced)",
        )
    elif facts.kind == "socket":
        yield note(
            SUBJECT, f"{facts.name} was left behind by an agent that was killed; the next one replaces it", start
        )
    elif not facts.may_make:
        yield problem(
            SUBJECT,
            f"no agent runs at {facts.name}, and this user cannot make a socket there",
            f"sudo install -d -o $USER {Path(facts.name).parent}, or set ALLREDUCED_SOCKET",
        )
    else:
        yield note(SUBJECT, f"no agent runs at {facts.name}", start)


def _connect(address: str) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        for _ in range(_TRIES):
            if (answer := probe.connect_ex(address)) != errno.EAGAIN:
                return answer
            time.sleep(_PAUSE)  # its queue may be full for a moment
        return errno.EAGAIN
