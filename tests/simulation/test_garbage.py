"""Peers and drivers that say anything: the engine never raises, and what it owes its clients still comes."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.cluster import Cluster, fingerprint
from tests.simulation.workload import over_seeds, plan, random_layouts, random_limits, submit_all

from allreduced.core.errors import PeerLost, ProtocolError, to_wire
from allreduced.core.identity import Member
from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.events import (
    ArenaFailed,
    ArenaReady,
    Changed,
    ClientGone,
    FrameArrived,
    Freeze,
    GroupBroken,
    Heard,
    LeasesReturned,
    NodeDeparted,
    RanksLeft,
    ReceiveCancelled,
    Received,
    Reduced,
    Sent,
    TimePassed,
)
from allreduced.daemon.engine.region import FIRST_ENGINE_BUFFER
from allreduced.protocol.change import Change, Failure, Loss, Result
from allreduced.protocol.peer import (
    Abort,
    Arrived,
    Call,
    Confirm,
    Differs,
    Fetch,
    Forget,
    Forgettable,
    Grant,
    Kept,
    MoreGrants,
    OperationFrame,
    Queued,
    Ready,
    Withdraw,
    Withdrawn,
)


def _frame(rng: random.Random, cluster: Cluster) -> OperationFrame:
    """Return a frame that fits the field types and nothing else, or a real one with a field changed."""
    sent = [frame for *_, frame in cluster.network.frames if not isinstance(frame, Forget | Forgettable | Confirm)]
    if sent and rng.random() < 0.6:
        frame = rng.choice(sent)
        if rng.random() < 0.5:
            return frame
        if isinstance(frame, Ready | MoreGrants | Withdraw | Withdrawn):
            return replace(frame, attempt=rng.randint(0, 4))
        return replace(frame, use=rng.randint(0, 4))
    head = (rng.randint(1, 4), rng.choice((1, 1, 1, 2)), rng.choice(("", "a", "b", "z")), rng.randint(0, 3))
    small = rng.randint(0, 3)
    grants = tuple(
        Grant(rng.randint(0, 50), rng.randint(0, 2), rng.randint(0, 3), rng.randint(0, 9), rng.randint(0, 9), b"1")
        for _ in range(small)
    )
    known = fingerprint(count=rng.choice((0, 16, 97)), op=rng.choice((Reduction.SUM, Reduction.MEAN)))
    stamp = rng.choice(((), (0, 5, 0), (1, 2), (-5, 1 << 60, 7)))
    return rng.choice(
        (
            Ready(*head, small, known, stamp, grants, rng.randint(0, 9), (rng.randint(0, 9),)),
            MoreGrants(*head, small, grants),
            Withdraw(*head, small),
            Withdrawn(*head, small, rng.random() < 0.5),
            Queued(*head, stamp),
            Arrived(*head, (small, 99)),
            Differs(*head, (Call(known, (small,)), Call(fingerprint(count=5), (small + 1,)))),
            Abort(*head, to_wire(ProtocolError("no")), rng.random() < 0.5),
            Kept(*head),
            Fetch(*head, grants),
        )
    )


def _round(rng: random.Random) -> Forget | Forgettable:
    """Return a frame of a round of forgetting that nobody began so."""
    group, generation, number = rng.randint(1, 4), rng.choice((1, 1, 1, 2)), rng.randint(1, 3)
    names = tuple(rng.sample(("a", "b", "z"), rng.randint(1, 3)))
    if rng.random() < 0.5:
        return Forgettable(group, generation, number, tuple(range(rng.randint(0, 2))))
    return Forget(group, generation, number, names, tuple(rng.randint(0, 2) for _ in names))


def _change(rng: random.Random, cluster: Cluster) -> Changed:
    """Return a change that nobody agreed on: members, results and failures at random."""
    group = rng.choice(list(cluster.groups.values()))
    generation = rng.choice((1, 1, 2, 3))
    members = tuple(member for member in group.members if rng.random() < 0.8)
    if rng.random() < 0.1:
        members = (*members, Member("stranger", 1, (77,)))
    results = tuple(
        Result(rng.choice(("", "a", "b", "z")), rng.randint(0, 2), tuple(rng.sample(range(4), rng.randint(0, 2))))
        for _ in range(rng.randint(0, 3))
    )
    failures = (Failure(rng.choice(("", "c")), rng.randint(0, 2), to_wire(ProtocolError("no"))),)
    losses = (Loss("x", (5,), True, True, to_wire(PeerLost("x died"))),) if rng.random() < 0.5 else ()
    change = Change(
        generation + 1, members, losses, rng.random() < 0.5, (rng.randint(0, 5),), results, failures, 1, (0,)
    )
    return Changed(group.group, generation, change)


def _disturb(rng: random.Random, cluster: Cluster) -> None:
    node = rng.choice(list(cluster.nodes.values()))
    others = [*cluster.nodes, "stranger"]
    number = rng.randint(1, 200)
    event = rng.choice(
        (
            FrameArrived(rng.choice(others), _frame(rng, cluster)),
            FrameArrived(rng.choice(others), _frame(rng, cluster)),
            FrameArrived(rng.choice(others), _round(rng)),
            FrameArrived(rng.choice(others), _round(rng)),
            Received(1_000_000 + number, rng.randint(-1, 99), rng.randint(-1, 99), rng.choice((0, (1 << 32) + 1))),
            FrameArrived(
                rng.choice(others), Confirm(rng.randint(1, 4), rng.choice((1, 2)), (number,), rng.random() < 0.5)
            ),
            Freeze(rng.randint(1, 4), rng.choice((1, 2))),
            _change(rng, cluster),
            Heard((rng.choice(others),)),
            NodeDeparted(rng.randint(1, 4), rng.choice(others)),
            TimePassed(),
            LeasesReturned(rng.randint(1000, 1003), (number,)),
            ClientGone(1),
            ReceiveCancelled(1_000_000 + number),
            Sent(1_000_000 + number),
            Reduced(1_000_000 + number),
            ArenaReady(FIRST_ENGINE_BUFFER + 1_000_000),
            ArenaFailed(FIRST_ENGINE_BUFFER + 1_000_000, ProtocolError("x")),
            RanksLeft(9, (1,)),
            GroupBroken(9, ProtocolError("x")),
        )
    )
    node.tell(event)


@over_seeds(100)
def test_nonsense_is_survived(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(seed, random_layouts(rng), random_limits(rng))
    requests = submit_all(cluster, rng, plan(cluster, rng, 8), deadline=2.0)
    for _ in range(rng.choice((3, 60))):
        cluster.agenda.at(rng.random() * 30e-3, lambda: _disturb(rng, cluster))
    cluster.agenda.run()
    for found in requests.values():  # an end, or this: the members do not follow what nobody agreed on
        assert all(len(request.answers) <= 1 for request in found)
    for number in cluster.groups:
        for node in cluster.nodes.values():
            node.tell(GroupBroken(number, ProtocolError("over")))
    cluster.run()
    cluster.close()
