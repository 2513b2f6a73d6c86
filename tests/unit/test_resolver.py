"""Names are looked up in threads that hold nobody up, and once for all who ask at the same time."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from allreduced.core.resolver import look_up

BOUND = 20.0
FOUND = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 7)) for _ in range(2)]


class Resolver:
    """Stands in the system's place: counts questions, and answers none before it is told."""

    def __init__(self) -> None:
        self.asked = 0
        self.asking = threading.Event()
        self.told = threading.Event()

    def getaddrinfo(self, host: str, port: int, **how: int) -> list[object]:
        self.asked += 1
        self.asking.set()
        assert self.told.wait(BOUND)
        if host == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return list(FOUND)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    resolver = Resolver()
    monkeypatch.setattr("allreduced.core.resolver.socket.getaddrinfo", resolver.getaddrinfo)
    return resolver


async def until(event: threading.Event) -> None:
    async with asyncio.timeout(BOUND):
        while not event.is_set():  # noqa: ASYNC110 # a thread sets it
            await asyncio.sleep(0)


async def test_numbers_need_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allreduced.core.aside.threading.Thread", None)
    assert await look_up("127.0.0.1", 7) == ((socket.AF_INET, ("127.0.0.1", 7)),)
    assert await look_up("::1", 7) == ((socket.AF_INET6, ("::1", 7, 0, 0)),)


async def test_the_system_s_names_are_known() -> None:
    assert (socket.AF_INET, ("127.0.0.1", 7)) in await look_up("localhost", 7)


@pytest.mark.parametrize("name", ["no-such-name.invalid", ".", "a..b", "a" * 64])
async def test_what_is_no_name_of_a_host_is_an_error(name: str) -> None:
    with pytest.raises(socket.gaierror):
        await look_up(name, 7)


async def test_an_open_question_is_asked_once_and_outlives_who_gives_up(resolver: Resolver) -> None:
    first, second = (asyncio.ensure_future(look_up("agents", 7)) for _ in range(2))
    await until(resolver.asking)
    first.cancel()
    await asyncio.wait([first])
    third = asyncio.ensure_future(look_up("agents", 7))
    await asyncio.sleep(0)
    resolver.told.set()
    async with asyncio.timeout(BOUND):
        assert await second == await third == ((socket.AF_INET, ("10.0.0.1", 7)),)
    assert resolver.asked == 1
    assert await look_up("agents", 7) == await second
    assert resolver.asked == 2  # an answer is not kept


async def test_all_who_ask_learn_that_a_name_is_not_known(resolver: Resolver) -> None:
    asking = [asyncio.ensure_future(look_up("unknown", 7)) for _ in range(3)]
    await until(resolver.asking)
    resolver.told.set()
    for one in asking:
        with pytest.raises(socket.gaierror, match="not known"):
            await one
    assert resolver.asked == 1


def test_the_end_of_a_loop_does_not_wait_for_the_resolver(resolver: Resolver) -> None:
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await look_up("agents", 7)

    asyncio.run(give_up())
    assert not resolver.told.is_set()
    resolver.told.set()
