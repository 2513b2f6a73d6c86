"""The socket's file: what is there is looked at, bound once, and taken away by whoever bound it."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
from pathlib import Path

import pytest

from allreduced.core.errors import ConfigError
from allreduced.daemon.socket_path import bind_socket


def test_a_path_that_is_too_long_is_refused_with_its_length(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="that this platform allows"):
        bind_socket(str(tmp_path / ("x" * 300)))
    for bad in ("", "@", "a\0b"):
        with pytest.raises(ConfigError):
            bind_socket(bad)


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is not a socket"):
        bind_socket(str(path))
    assert path.read_text() == "precious"


def test_a_live_agents_socket_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    bound = bind_socket(path)
    with pytest.raises(ConfigError, match="an agent answers"):
        bind_socket(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    bound.close()


def test_a_left_over_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    bound = bind_socket(str(path), mode=0o666)
    assert path.stat().st_mode & 0o777 == 0o666
    bound.close()
    bound.close()
    assert not path.exists()


def test_an_agent_that_ends_takes_no_file_away_that_is_not_its_own(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    ending = bind_socket(str(path))
    ending.sock = Ending(ending.sock, path)
    ending.close()  # another agent starts as soon as nobody listens any more
    assert isinstance(ending.sock, Ending)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    ending.sock.other.close()
    assert not path.exists()


class Ending(socket.socket):
    """A listening socket at whose end another agent starts at the same path."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        super().__init__(fileno=sock.detach())
        self._path = path

    def close(self) -> None:
        super().close()
        self.other = bind_socket(str(self._path))


def test_somebody_elses_socket_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match=f"belongs to uid {uid}"):
        bind_socket(str(path))
    assert path.is_socket()


def test_nobody_else_can_keep_an_agent_from_starting_by_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    folder = os.open(tmp_path, os.O_RDONLY)  # which whoever may read it can lock
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        bind_socket(str(path)).close()
    finally:
        os.close(folder)
    assert list(tmp_path.iterdir()) == []


def test_two_agents_do_not_start_at_one_path_at_once(tmp_path: Path) -> None:
    path, lock = tmp_path / "agent.sock", tmp_path / "agent.sock.lock"
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another agent starts at"):
            bind_socket(str(path))
    bound = bind_socket(str(path))  # a lock file that was left behind is of no harm
    assert [name.name for name in tmp_path.iterdir()] == ["agent.sock"]
    bound.close()


def test_a_lock_file_that_is_taken_away_by_its_holder_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / "agent.sock", tmp_path / "agent.sock.lock"
    flock, calls = fcntl.flock, []

    def after_the_other(descriptor: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            lock.unlink()  # the other agent is ready just now
        elif len(calls) == 2:
            lock.unlink()
            lock.touch(0o600)  # and a third one has made its own
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", after_the_other)
    bind_socket(str(path)).close()
    assert len(calls) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "fifo", "somebody else's"])
def test_a_lock_file_that_is_not_the_agents_own_is_not_touched(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock, precious = tmp_path / "agent.sock", tmp_path / "agent.sock.lock", tmp_path / "precious"
    precious.write_text("precious")
    if kind == "link":
        lock.symlink_to(precious)
    elif kind == "fifo":
        os.mkfifo(lock)
    else:
        lock.write_text("precious")
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=rf"^no socket can be made at {path}: its lock {lock} ") as caught:
        bind_socket(str(path))
    assert "choose another path" in caught.value.hint
    assert sorted(tmp_path.iterdir()) == before
    assert precious.read_text() == "precious"


def test_a_file_that_another_agent_put_there_survives_close(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    bound = bind_socket(str(path))
    path.unlink()
    path.write_text("another's")
    bound.close()
    assert path.read_text() == "another's"


def test_a_folder_that_is_missing_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=os.strerror(errno.ENOENT)):
        bind_socket(str(tmp_path / "a" / "b" / "agent.sock"))


def test_abstract_sockets_leave_nothing_and_are_taken_once() -> None:
    name = f"@allreduced-test-{secrets.token_hex(8)}"
    bound = bind_socket(name)
    with pytest.raises(ConfigError, match="listens at"):
        bind_socket(name)
    bound.close()
    bind_socket(name).close()
