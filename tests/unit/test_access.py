"""Who may attach, by uid, by groups and by the socket's permissions."""

from __future__ import annotations

import asyncio
import grp
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.local_plane import open_plane

from allreduced.core.errors import AuthenticationError, ConfigError, from_wire
from allreduced.daemon.access import (
    Access,
    Credentials,
    access_from,
    credentials_of,
    own_uid_only,
    socket_group,
    socket_mode,
)
from allreduced.daemon.settings import Access as Settings
from allreduced.daemon.socket_path import bind_socket
from allreduced.protocol import local

STRANGER = Credentials(7, 1001, (1001, 27))


@pytest.mark.parametrize(
    ("access", "may"),
    [
        (Access(1001), True),
        (Access(500), False),
        (Access(500, users=frozenset({1001})), True),
        (Access(500, users=frozenset({1002})), False),
        (Access(500, groups=frozenset({1001})), True),  # the primary one
        (Access(500, groups=frozenset({27})), True),  # a supplementary one
        (Access(500, groups=frozenset({0})), False),
        (Access(500, everybody=True), True),
    ],
)
def test_uids_and_gids_decide(access: Access, may: bool) -> None:
    assert access.may_attach(STRANGER) is may
    assert access.may_look(STRANGER) is may


def test_root_may_look_and_not_attach() -> None:
    access = Access(500)
    root = Credentials(7, 0, (0,))
    assert access.may_look(root)
    assert not access.may_attach(root)


def test_a_refusal_says_who_what_and_which_setting() -> None:
    access = access_from(Settings(users=("root", "1234"), groups=("root",)), 500)
    error = access.refusal(STRANGER)
    assert error.message == (
        "uid 1001 (gid 1001, 27) may not attach to this agent, which runs as uid 500: "
        "access.users allows root, 1234, access.groups allows root"
    )
    assert "access.users" in error.hint
    many = access_from(Settings(users=tuple(str(uid) for uid in range(2000, 3000))), 500)
    assert "2007 and 992 more" in many.refusal(STRANGER).message
    assert len(str(many.refusal(Credentials(1, 1, tuple(range(5000)))))) < 1000


def test_names_and_numbers_are_taken() -> None:
    access = access_from(Settings(users=("root", "77", "*"), groups=("root", "88")), 500)
    assert access.users == {0, 77}
    assert access.groups == {grp.getgrnam("root").gr_gid, 88}
    assert access.everybody
    assert access_from(Settings(), 500) == Access(500, told="access.users allows nobody, access.groups allows nobody")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (Settings(users=("no-such-user",)), "access.users"),
        (Settings(groups=("no-such-group",)), "access.groups"),
        (Settings(users=("",)), "access.users"),
    ],
)
def test_unknown_names_are_errors(settings: Settings, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        access_from(settings, 500)
    assert caught.value.path == key
    assert "getent" in caught.value.hint
    with pytest.raises(ConfigError, match=r"access\.socket_group"):
        socket_group(Settings(socket_group="no-such-group"))


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        (Settings(), 0o600),
        (Settings(socket_group="root"), 0o660),
        (Settings(users=("root",)), 0o666),
        (Settings(groups=("root",)), 0o666),
        (Settings(groups=("root",), socket_group="root"), 0o660),
        (Settings(users=("root",), socket_mode="0600"), 0o600),
        (Settings(socket_mode="770"), 0o770),
    ],
)
def test_the_socket_is_as_narrow_as_those_who_may_attach(settings: Settings, mode: int) -> None:
    assert socket_mode(settings) == mode


def test_the_kernel_tells_who_connected() -> None:
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        who = credentials_of(near)
    assert (who.pid, who.uid, who.groups[0]) == (os.getpid(), os.geteuid(), os.getegid())
    assert set(who.groups) == {os.getegid(), *os.getgroups()}


async def test_mode_and_group_of_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    bound = bind_socket(str(path), mode=0o660, group=os.getegid())
    found = path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o660
    assert found.st_gid == os.getegid()
    bound.use_mode(0o666)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    path.rename(tmp_path / "moved")
    path.touch(0o600)
    bound.use_mode(0o666)  # that file is not its own
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    bound.close()
    assert path.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may give a file to any group")
def test_a_group_that_the_socket_cannot_be_given_to_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        bind_socket(str(tmp_path / "agent.sock"), group=0)
    assert caught.value.path == "access.socket_group"
    assert not (tmp_path / "agent.sock").exists()


CONNECT = """
import os, socket, sys
groups, gid, uid = [int(x) for x in sys.argv[2].split(",") if x], int(sys.argv[3]), int(sys.argv[4])
os.setgroups(groups); os.setgid(gid); os.setuid(uid)
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1].replace("@", "\\0", 1))
try:
    s.sendall(bytes.fromhex(sys.argv[5]))
except BrokenPipeError:
    pass  # refused already; why is there to be read
sys.stdout.buffer.write(s.recv(4096))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("groups", "gid", "uid", "may"),
    [("", 4321, 4321, False), ("4444", 4321, 4321, True), ("", 4444, 4321, True), ("", 4321, 4322, True)],
)
async def test_another_user_is_judged_by_uid_and_all_of_its_groups(groups: str, gid: int, uid: int, may: bool) -> None:
    access = access_from(Settings(users=("4322",), groups=("4444",)), os.geteuid())
    async with open_plane(access=access) as plane:
        hello = local.encode(local.Hello(1, 2, 1, True)).hex()
        command = (sys.executable, "-c", CONNECT, plane.name, groups, str(gid), str(uid), hello)
        answer = (await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, check=True)).stdout
    message = local.decode_to_client(answer[4:])
    if may:
        assert isinstance(message, local.Welcome)
    else:
        assert isinstance(message, local.Refused)
        error = from_wire(message.error)
        assert isinstance(error, AuthenticationError)
        assert "uid 4321 (gid 4321) may not attach" in error.message


def test_the_default_is_the_own_user() -> None:
    mine = Credentials(1, os.geteuid(), (os.getegid(),))
    assert own_uid_only().may_attach(mine)
    assert not own_uid_only().may_attach(Credentials(1, os.geteuid() + 1, (os.getegid(),)))
