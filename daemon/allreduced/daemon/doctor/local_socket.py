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
from allreduced.daemon.doctor.finding import Finding, note, ok, problem, warning
from allreduced.daemon.private_file import closed_folder

SUBJECT = "socket"

_TRIES, _PAUSE = 20, 0.05
"""How often it is tried to get into a full queue, and seconds between two tries."""


@dataclass(frozen=True, slots=True)
class SocketFacts:
    """What is at the place of the socket.

    ``kind``: ``abstract``, ``socket``, ``other`` (something else is there), ``nothing``, ``no_folder`` or ``hidden``
    (this user may not look). ``answer``: what connecting gave: 0, or an errno. ``mode``: permission bits; ``uid`` and
    ``gid``: whose the socket is. ``may_make``: whether this user could make a socket there. ``folder_uid``: whose the
    folder is. ``asker``: the uid of this process. ``closed``: the folder that it may not enter, where it may not look.
    """

    name: str
    kind: str
    answer: int
    mode: int = 0
    uid: int = 0
    gid: int = 0
    may_make: bool = True
    folder_uid: int = 0
    asker: int = 0
    closed: str = ""


def socket_facts(name: str) -> SocketFacts:
    """Look at the place ``name``, a path or ``@name``, and connect to it once; nothing is sent.

    :raises ConfigError: it cannot be the name of a socket.
    """
    address = parse_socket(name, path="agent.socket")
    answer = _connect(address.sockaddr)
    if address.abstract:
        return SocketFacts(name, "abstract", answer)
    folder = Path(name).parent
    # Not Path.exists, which raises where a folder on the way may not be entered.
    there = os.access(folder, os.F_OK, effective_ids=True)
    may_make = os.access(folder if there else folder.parent, os.W_OK | os.X_OK, effective_ids=True)
    try:
        found = os.lstat(name)
        folder_uid = folder.stat().st_uid
    except FileNotFoundError:
        return SocketFacts(name, "nothing" if there else "no_folder", answer, may_make=may_make)
    except OSError:
        return SocketFacts(name, "hidden", answer, may_make=False, closed=str(closed_folder(name) or folder))
    kind = "socket" if stat.S_ISSOCK(found.st_mode) else "other"
    mode = stat.S_IMODE(found.st_mode)
    return SocketFacts(
        name, kind, answer, mode, found.st_uid, found.st_gid, may_make, folder_uid=folder_uid, asker=os.geteuid()
    )


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
                f"this user may not look at {facts.name}: it may not enter {facts.closed}",
                f"join the group of {facts.closed} (usermod -aG), or name another socket (ALLREDUCED_SOCKET)",
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
        yield _left_behind(facts, start)
    elif not facts.may_make:
        yield problem(
            SUBJECT,
            f"no agent runs at {facts.name}, and this user cannot make a socket there",
            f"sudo install -d -o $USER {Path(facts.name).parent}, or set ALLREDUCED_SOCKET",
        )
    else:
        yield note(SUBJECT, f"no agent runs at {facts.name}", start)


def _left_behind(facts: SocketFacts, start: str) -> Finding:
    """Return what is to be said about a socket where nobody listens: only an agent of its owner replaces it. Pure."""
    uid = facts.uid
    text = (
        f"{facts.name} was left behind by an agent of uid {uid} that was killed; an agent of uid {uid} replaces it, one"
        " of another user does not start"
    )
    if uid == facts.folder_uid != 0 or uid == facts.asker != 0:
        return note(SUBJECT, text, start)
    mend = f"sudo rm {facts.name}; then {start}"
    if facts.folder_uid not in (0, uid):
        return problem(SUBJECT, f"{text}, and the folder is that of uid {facts.folder_uid}", mend)
    return warning(SUBJECT, text, mend)


def _connect(address: str) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        for _ in range(_TRIES):
            if (answer := probe.connect_ex(address)) != errno.EAGAIN:
                return answer
            time.sleep(_PAUSE)  # its queue may be full for a moment
        return errno.EAGAIN
