"""When a private agent ends by itself."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.local_plane import PATIENCE, open_plane

from allreduced.daemon.lifetime import Lifetime
from allreduced.daemon.membership.events import ClientGone

LONG = 1000.0


async def ended(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE):
        await event.wait()


async def test_an_agent_to_which_nobody_comes_ends() -> None:
    end = asyncio.Event()
    lifetime = Lifetime(end.set, first_client=0.0, linger=LONG)
    await ended(end)
    lifetime.close()


async def test_an_agent_that_served_ends_after_the_linger_and_not_after_the_wait_for_the_first_client() -> None:
    end = asyncio.Event()
    lifetime = Lifetime(end.set, first_client=LONG, linger=0.0)
    lifetime.clients_changed(1, served=True)
    lifetime.clients_changed(0, served=True)
    await ended(end)
    lifetime.close()


@pytest.mark.parametrize("served", [False, True])
async def test_an_agent_with_a_client_lives(served: bool) -> None:
    end = asyncio.Event()
    lifetime = Lifetime(end.set, first_client=0.0, linger=0.0)
    lifetime.clients_changed(1, served=served)
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, later.set)
    await ended(later)
    assert not end.is_set()
    lifetime.close()


async def test_a_stranger_that_comes_and_goes_changes_nothing() -> None:
    end = asyncio.Event()
    lifetime = Lifetime(end.set, first_client=0.0, linger=LONG)
    lifetime.clients_changed(1, served=False)
    lifetime.clients_changed(0, served=False)
    await ended(end)
    lifetime.close()


async def test_the_server_tells_of_clients_that_came_and_of_the_last_one_that_went() -> None:
    async with open_plane() as plane:
        end = asyncio.Event()
        lifetime = Lifetime(end.set, first_client=LONG, linger=0.0)
        plane.server.report_to(lifetime)
        first, second = await plane.attach(), await plane.attach()
        first.sock.close()
        await plane.sink.told(ClientGone)
        assert plane.server.clients == 1
        assert not end.is_set()
        second.sock.close()
        await ended(end)
        lifetime.close()
