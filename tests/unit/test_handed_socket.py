"""A service manager may listen for the clients before the agent runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allreduced.core.errors import ConfigError
from allreduced.daemon.handed_socket import handed_socket

Hand = Callable[..., dict[str, str]]
FIRST = 200
"""Descriptors that nothing else has."""


@pytest.fixture
def hand() -> Iterator[Hand]:
    """Put descriptors where a service manager does, and return the variables that it sets."""
    given: list[int] = []

    def put(*files: socket.socket | int, names: str | None = None) -> dict[str, str]:
        for at, file in enumerate(files):
            os.dup2(file if isinstance(file, int) else file.fileno(), FIRST + at)
            given.append(FIRST + at)
        environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(files)), "HOME": "/"}
        return environ if names is None else environ | {"LISTEN_FDNAMES": names}

    yield put
    for descriptor in given:
        try:
            os.close(descriptor)
        except OSError:
            continue


def listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen()
    return sock


def test_nothing_handed_over() -> None:
    assert handed_socket({}) is None
    assert handed_socket({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0"}) is None


def test_what_is_meant_for_another_process_is_left_alone() -> None:
    environ = {"LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDS": "1"}
    assert handed_socket(environ) is None
    assert environ == {}


@pytest.mark.parametrize("names", [None, "allreduced.socket", "clients"])
def test_a_single_socket_is_for_clients(hand: Hand, tmp_path: Path, names: str | None) -> None:
    path = tmp_path / "agent.sock"
    with listening(path) as sock:
        environ = hand(sock, names=names)
    bound = handed_socket(environ, first=FIRST)
    assert bound is not None
    assert environ == {"HOME": "/"}
    assert bound.name == str(path)
    assert not bound.sock.getblocking()
    assert not os.get_inheritable(FIRST)
    bound.close()
    assert path.exists()  # it is the service manager's


def test_of_several_the_name_decides(hand: Hand, tmp_path: Path) -> None:
    with listening(tmp_path / "a") as other, listening(tmp_path / "b") as clients:
        environ = hand(other, clients, names="other:clients")
    bound = handed_socket(environ, first=FIRST)
    assert bound is not None
    assert bound.name == str(tmp_path / "b")
    bound.close()


def test_several_without_the_name_are_an_error(hand: Hand, tmp_path: Path) -> None:
    with listening(tmp_path / "a") as one, listening(tmp_path / "b") as two:
        environ = hand(one, two, names="a:b")
    with pytest.raises(ConfigError, match=r"2 sockets were handed over, 0 of them named 'clients': a, b"):
        handed_socket(environ, first=FIRST)


def test_another_kind_of_descriptor_is_an_error(hand: Hand) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        environ = hand(sock)
    with pytest.raises(ConfigError, match="no listening Unix stream socket"):
        handed_socket(environ, first=FIRST)
    reading, writing = os.pipe()
    environ = hand(reading)
    os.close(reading)
    os.close(writing)
    with pytest.raises(ConfigError, match=f"descriptor {FIRST} that was handed over is no socket"):
        handed_socket(environ, first=FIRST)


def test_a_descriptor_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match=f"descriptor {FIRST} that was handed over is no socket: Bad file descriptor"):
        handed_socket({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}, first=FIRST)
