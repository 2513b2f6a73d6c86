"""Why an RDMA link is over, where the control flow tells of the end before the loop has heard the device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.contract.conftest import pattern
from tests.support.fake_verbs import RETRIES, FakeDevice
from tests.support.rdma_rig import Rig, rig, turns

from allreduced.core.errors import AgentUnavailable
from allreduced.transports.rdma.link import RdmaLink
from allreduced.transports.rdma.verbs_port import AsyncKind, AsyncNews, VerbsError

SIZE = 128 << 10
RESET = "Connection reset by peer"


def _device(link: Rig) -> FakeDevice:
    """Return the device that the far end has open."""
    assert isinstance(link.far, RdmaLink)
    device = link.far_pairs[0].domain.device
    assert isinstance(device, FakeDevice)
    return device


def _port_is_down(link: Rig) -> None:
    """As seen by an end whose event is still on its way."""
    link.fabric.down.add(("fake0", 1))


def _port_is_down_it_says(link: Rig) -> None:
    _port_is_down(link)
    _device(link).tell(AsyncNews(AsyncKind.OTHER, "another GID"))
    _device(link).tell(AsyncNews(AsyncKind.PORT_DOWN, "the port went down"))


def _other_port_is_down(link: Rig) -> None:
    _device(link).tell(AsyncNews(AsyncKind.PORT_DOWN, "the port went down"))


def _removed(link: Rig) -> None:
    link.fabric.remove("fake0", silently=True)


def _pair_failed(link: Rig) -> None:
    link.far_pairs[0].fail()


def _nothing(link: Rig) -> None:
    """All is well here."""


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (_nothing, RESET),
        (_port_is_down, "RDMA by fake0: the port is down"),
        (_port_is_down_it_says, "RDMA by fake0: the port went down"),
        (_other_port_is_down, RESET),
        (_removed, "RDMA by fake0: the device was removed"),
        (_pair_failed, "RDMA by fake0: the queue pair failed"),
    ],
)
async def test_the_device_knows_better_why_the_peer_has_reset_the_link(
    happens: Callable[[Rig], None], reason: str
) -> None:
    async with rig() as link:
        happens(link)
        assert await _said_after_a_reset(link) == reason


async def test_the_request_that_failed_is_the_reason_and_not_those_that_were_flushed_after_it() -> None:
    async with rig() as link:
        link.fabric.held = True
        for k in (1, 2):
            token = link.near.post_receive(k, memoryview(bytearray(SIZE)))
            link.far.send(k, token, 0, memoryview(pattern(SIZE, k)))
        await turns()
        link.far_pairs[0].fail(RETRIES)
        assert await _said_after_a_reset(link) == f"RDMA by fake0: {RETRIES}"


async def test_a_port_that_is_down_is_the_reason_and_not_the_requests_that_fail_of_it() -> None:
    async with rig() as link:
        _port_is_down(link)
        link.far_pairs[0].fail("local queue pair error")
        await link.until_closed()
        assert link.reason(link.far_events).endswith("is broken: RDMA by fake0: the port is down")


async def test_a_device_that_tells_nothing_any_more_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(port: int) -> bool:
        raise VerbsError(f"cannot query port {port}: Input/output error")

    async with rig() as link:
        monkeypatch.setattr(_device(link), "is_active", silent)
        assert await _said_after_a_reset(link) == "RDMA by fake0: cannot query port 1: Input/output error"


async def test_an_end_in_order_asks_for_no_cause() -> None:
    async with rig() as link:
        link.fabric.down.add(("fake0", 1))
        near, far = asyncio.create_task(link.near.close(10)), asyncio.create_task(link.far.close(10))
        await asyncio.gather(near, far)
        assert link.near_events.ends == link.far_events.ends == [None]


async def _said_after_a_reset(link: Rig) -> str:
    """Return the reason that the far end gives when its control flow is reset before it hears anything else."""
    assert isinstance(link.far, RdmaLink)
    link.far.control_ended(RESET)
    await link.until_closed()
    (error,) = link.far_events.ends
    assert isinstance(error, AgentUnavailable)
    return error.message.removeprefix(f"the link to node 'a' at {link.far.remote_address} is broken: ")
