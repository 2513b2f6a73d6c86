"""Dialling an address to see what is there, over real sockets."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from typing import NoReturn

import pytest

from allreduced.daemon.reach import Dialled, dial_once, failure


async def test_who_listens_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        found = await dial_once(f"tcp://127.0.0.1:{listening.getsockname()[1]}", 20.0)
        assert (found.outcome, found.detail) == ("reached", "")
        assert 0.0 < found.seconds < 20.0
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.recv(1) == b""  # nothing was said


async def test_who_does_not_listen_refuses() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody else has the port, and nobody listens there
        found = await dial_once(f"tcp://127.0.0.1:{bound.getsockname()[1]}", 20.0)
    assert found == Dialled("refused", "Connection refused", 0.0)


async def test_packets_that_are_dropped_are_silence() -> None:
    """As with a firewall: the system drops what does not fit into the queue of a listening socket."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        place = listening.getsockname()
        stack.enter_context(socket.create_connection(place, 20.0))  # the queue holds this one
        found = await dial_once(f"tcp://127.0.0.1:{place[1]}", 0.2)
    assert found == Dialled("silent", "nothing came back within 0.2 s", 0.0)


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1"])
async def test_what_is_no_address_is_told(address: str) -> None:
    found = await dial_once(address, 20.0)
    assert (found.outcome, found.seconds) == ("failed", 0.0)
    assert address in found.detail


async def test_a_name_that_is_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(host: str, port: int) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("allreduced.daemon.reach.look_up", unknown)
    found = await dial_once("tcp://no-such-host.invalid:1", 20.0)
    assert found == Dialled("unknown", "no-such-host.invalid: Name or service not known", 0.0)


@pytest.mark.parametrize(
    ("code", "outcome", "words"),
    [
        (errno.ECONNREFUSED, "refused", "Connection refused"),
        (errno.EHOSTUNREACH, "silent", "No route to host"),
        (errno.ENETUNREACH, "silent", "Network is unreachable"),
        (errno.ETIMEDOUT, "silent", "Connection timed out"),
        (errno.EPERM, "failed", "Operation not permitted"),
    ],
)
def test_what_errors_of_connect_mean(code: int, outcome: str, words: str) -> None:
    assert failure(OSError(code, "Connect call failed ('10.0.0.1', 4123)")) == Dialled(outcome, words, 0.0)


def test_an_error_without_a_number_is_told_in_its_own_words() -> None:
    assert failure(OSError("why")) == Dialled("failed", "why", 0.0)
