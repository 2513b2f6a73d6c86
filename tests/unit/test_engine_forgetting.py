"""A round that forgets names is bounded, also where a member that lives never answers."""

from __future__ import annotations

from tests.support.bare_cluster import GROUP, BareCluster, BareNode

from allreduced.core.dtypes import DType
from allreduced.core.errors import DeadlineExceeded
from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.actions import Action, Deliver, GiveUp, SendFrame, SetTimer
from allreduced.daemon.engine.events import GroupBroken, TimePassed
from allreduced.daemon.engine.limits import Limits
from allreduced.protocol.peer import Fingerprint, Forgettable

CALL = Fingerprint("all_reduce", int(DType.FLOAT32), int(Reduction.SUM), "(4,)", 4, -1, "")


class Unanswering(BareCluster):
    """A cluster whose answers to proposals are lost."""

    timer: float | None = None

    def __init__(self, nodes: int, limits: Limits) -> None:
        self.gave_up: list[GiveUp] = []
        super().__init__(nodes, limits=limits)

    def _do(self, node: BareNode, action: Action) -> None:
        if isinstance(action, SetTimer) and node.name == "n0":
            self.timer = action.at
        if isinstance(action, GiveUp):
            self.gave_up.append(action)
        if not (isinstance(action, SendFrame) and isinstance(action.frame, Forgettable)):
            super()._do(node, action)


def _call(cluster: BareCluster, name: str, deadline_at: float = 1e9) -> list[int]:
    requests = [cluster.submit(rank, name, CALL, 16, deadline_at) for rank in cluster.ranks]
    cluster.run()
    return requests


def test_a_call_that_waits_for_a_round_that_nobody_ends_fails_by_its_deadline() -> None:
    cluster = Unanswering(2, limits=Limits(names_kept=1))
    for name in ("a", "b", "c"):
        assert all(isinstance(cluster.results[request], Deliver) for request in _call(cluster, name))
    held, other = _call(cluster, "a", deadline_at=30.0)
    assert held not in cluster.results
    while (at := cluster.timer) is not None and at <= 30.0:
        cluster.now, cluster.timer = at, None
        cluster.tell("n0", TimePassed())
    assert cluster.now == 30.0
    error = cluster.results[held]
    assert isinstance(error, DeadlineExceeded)
    assert "the agents of n1 did not say in time" in error.message
    assert error.missing == ()
    # the group is over here: pairing calls again after half a round could mix them up
    late = cluster.submit(0, "d", CALL, 16)
    cluster.run()
    assert cluster.results[late] is error
    assert cluster.gave_up == [GiveUp(GROUP, error)]
    # the other member had all answers; its call has no word of this one and waits for the agreed end of the group
    for _ in range(2):  # who is there, then the end
        cluster.tell("n1", TimePassed())
    assert other not in cluster.results
    cluster.tell("n1", GroupBroken(GROUP, error))
    assert cluster.results[other] is error


def test_a_round_that_ends_lets_its_calls_go_on() -> None:
    cluster = BareCluster(2, limits=Limits(names_kept=1))
    for name in ("a", "b", "c", "a", "b", "d", "a"):
        assert all(isinstance(cluster.results[request], Deliver) for request in _call(cluster, name, 5.0))
    cluster.now = 5.0
    for node in cluster.nodes:
        cluster.tell(node, TimePassed())
    assert all(isinstance(cluster.results[request], Deliver) for request in _call(cluster, "a", 9.0))
