"""Dialling other agents when asked, and measuring links."""

from __future__ import annotations

import asyncio

from allreduced.daemon.ports import ReachablePeer
from allreduced.daemon.reach import LOADS, TRIES, Dialled, ReachService
from allreduced.protocol.peer import MAX_LOAD, Frame, Load, Loaded
from allreduced.protocol.status import ReachReport

OLD = "old"
"""An agent that speaks version 1 of the agents' protocol, which has no loads."""


class Peers:
    def __init__(self, up: dict[str, str], wanted: tuple[tuple[str, str], ...] = ()) -> None:
        self.up = up
        self.others = wanted
        self.sent: list[tuple[str, Frame]] = []
        self.service: ReachService | None = None

    def view(self) -> tuple[ReachablePeer, ...]:
        return tuple(
            ReachablePeer(node, 1, address, "", 0.0, version=1 if node == OLD else 2)
            for node, address in self.up.items()
        )

    def wanted(self) -> tuple[tuple[str, str], ...]:
        return self.others

    def send_frame(self, node: str, frame: Frame) -> None:
        self.sent.append((node, frame))
        if isinstance(frame, Load) and self.service is not None:
            asyncio.get_running_loop().call_soon(self.service.frame_arrived, node, Loaded(frame.number))


async def test_every_known_agent_is_dialled_at_its_address() -> None:
    answers = {
        "tcp://b:1": [Dialled("reached", "", 0.3), Dialled("reached", "", 0.1), Dialled("reached", "", 0.2)],
        "tcp://c:1": [Dialled("silent", "nothing", 0.0)],
    }

    async def dial(address: str) -> Dialled:
        return answers[address].pop(0)

    peers = Peers({"b": "tcp://b:1", "d": ""}, (("c", "tcp://c:1"),))
    assert await ReachService(peers, dial=dial).examine(bandwidth=False) == (
        ReachReport("b", "tcp://b:1", "reached", "", 0.1, 0),
        ReachReport("c", "tcp://c:1", "silent", "nothing", 0.0, 0),
        ReachReport("d", "", "unknown", "it tells no address, so only it can dial", 0.0, 0),
    )
    assert answers == {"tcp://b:1": [], "tcp://c:1": []}
    assert TRIES == 3
    assert peers.sent == []


async def test_links_are_measured_with_loads_that_are_answered() -> None:
    async def dial(address: str) -> Dialled:
        return Dialled("reached", "", 0.1)

    peers = Peers({"b": "tcp://b:1"})
    peers.service = ReachService(peers, dial=dial)
    (found,) = await peers.service.examine(bandwidth=True)
    assert found.bandwidth > 0
    loads = [frame for _, frame in peers.sent if isinstance(frame, Load)]
    assert len(loads) == LOADS
    assert all(len(load.data) == MAX_LOAD for load in loads)
    assert len({load.number for load in loads}) == LOADS


async def test_an_agent_of_an_earlier_version_is_dialled_and_its_link_not_measured() -> None:
    async def dial(address: str) -> Dialled:
        return Dialled("reached", "", 0.1)

    peers = Peers({OLD: "tcp://b:1"})
    assert await ReachService(peers, dial=dial).examine(bandwidth=True) == (
        ReachReport(OLD, "tcp://b:1", "reached", "", 0.1, 0),
    )
    assert peers.sent == []


async def test_a_load_is_answered_and_answers_of_others_are_ignored() -> None:
    peers = Peers({})
    service = ReachService(peers)
    service.frame_arrived("b", Load(7, b"x"))
    service.frame_arrived("b", Loaded(7))
    assert peers.sent == [("b", Loaded(7))]
