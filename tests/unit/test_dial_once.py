"""Dialling an address to see what is there, over real sockets."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from allreduced.daemon.reach import Dialled, dial_once


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


@pytest.mark.parametrize(
    ("address", "outcome", "detail"),
    [
        ("tcp://no-such-name.invalid:1", "unknown", "no-such-name.invalid: "),
        ("tcp://127.0.0.1", "failed", "127.0.0.1"),
    ],
)
async def test_addresses_that_lead_nowhere(address: str, outcome: str, detail: str) -> None:
    found = await dial_once(address, 20.0)
    assert (found.outcome, found.seconds) == (outcome, 0.0)
    assert detail in found.detail
    assert found.detail
