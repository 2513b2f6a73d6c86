"""A whole simulated cluster: nodes, one or more groups, clients that submit, and the checks at the end.

Everything follows from the seed. A failing run prints the command that repeats it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import numpy.typing as npt
from tests.simulation.agenda import Agenda
from tests.simulation.kernels import numpy_dtype
from tests.simulation.network import Network
from tests.simulation.node import SimulatedNode

from allreduced.core.dtypes import DType
from allreduced.core.errors import AllReducedError
from allreduced.core.identity import GroupKey, Member
from allreduced.core.reductions import Reduction
from allreduced.daemon.engine.actions import Deliver, Fail
from allreduced.daemon.engine.events import GroupForgotten, GroupStarted, LeasesReturned, Submitted
from allreduced.daemon.engine.limits import Limits
from allreduced.daemon.engine.region import FIRST_ENGINE_BUFFER, Region
from allreduced.protocol.peer import Fingerprint


@dataclass(slots=True)
class Call:
    """One operation as one rank calls it."""

    name: str
    fingerprint: Fingerprint
    data: npt.NDArray[np.generic] | None
    priority: int = 0
    deadline: float = 1e6


@dataclass(slots=True)
class Request:
    """A submit and its one answer."""

    group: int
    rank: int
    use: int
    call: Call
    node: SimulatedNode
    source: Region | None
    answers: list[AllReducedError | bytes | None] = field(default_factory=list)

    @property
    def error(self) -> AllReducedError | None:
        """The error that ended it."""
        answer = self.answers[0]
        return answer if isinstance(answer, AllReducedError) else None

    @property
    def result(self) -> npt.NDArray[np.generic] | None:
        """The result that it got."""
        answer = self.answers[0]
        return np.frombuffer(answer, numpy_dtype(self.call.fingerprint.dtype)) if isinstance(answer, bytes) else None


class Cluster:
    """``layouts[i]`` gives the nodes of group ``i + 1``: the ranks of each node, by node name.

    ``uids``: to whom the groups belong in turns.
    """

    def __init__(
        self,
        seed: int,
        layouts: Sequence[Mapping[str, Sequence[int]]],
        limits: Limits,
        tile_bytes: int = 64,
        uids: Sequence[int] = (1000,),
    ) -> None:
        limits = replace(limits, failure_timeout=inf)  # nobody falls silent here
        self.rng = random.Random(seed)
        self.agenda = Agenda()
        self.network = Network(self.agenda, self.rng)
        self.requests: list[Request] = []
        self.groups: dict[int, GroupStarted] = {}
        self.lease_time = 2e-3
        self.finished: list[tuple[str, int]] = []
        """(name, use) of each result, in the order in which they came."""
        self._next_buffer = 1
        self._uids = tuple(uids)
        self._clients: dict[tuple[int, int], int] = {}
        self._uses: dict[tuple[int, int, str], int] = {}
        for layout in layouts:
            for name in layout:
                if name not in self.network.nodes:
                    self.network.nodes[name] = SimulatedNode(name, limits, self.agenda, self.rng, self.network, self)
        for number, layout in enumerate(layouts, 1):
            self._start_group(number, layout, tile_bytes)

    @property
    def nodes(self) -> dict[str, SimulatedNode]:
        """The nodes by name."""
        return self.network.nodes

    def node_of(self, group: int, rank: int) -> SimulatedNode:
        """Return the node that holds the rank."""
        members = self.groups[group].members
        return self.nodes[next(member.node for member in members if rank in member.ranks)]

    def submit(self, at: float, group: int, rank: int, call: Call) -> Request:
        """Let a rank call an operation at ``at``. Calls of one rank with one name are used in the order of this."""
        node = self.node_of(group, rank)
        source = None
        if call.data is not None:
            source = self._place(node, call.data)
        use = self._uses.get((group, rank, call.name), 0)
        self._uses[group, rank, call.name] = use + 1
        request = Request(group, rank, use, call, node, source)
        number = len(self.requests)
        self.requests.append(request)
        client = self._clients[group, rank]

        def submit() -> None:
            deadline_at = self.agenda.now + call.deadline
            node.tell(
                Submitted(client, number, group, rank, call.name, call.fingerprint, source, deadline_at, call.priority)
            )

        self.agenda.at(at, submit)
        return request

    def delivered(self, node: SimulatedNode, action: Deliver, data: bytes | None) -> None:
        """Read the result, under its lease for a while, and give the lease back."""
        request = self.requests[action.request]
        assert request.node is node
        self.finished.append((request.call.name, request.use))
        region = action.region
        if region is None or action.lease == 0:
            request.answers.append(data)
            return
        first = node.view(region).tobytes()
        request.answers.append(first)

        def back() -> None:
            assert node.view(region).tobytes() == first, "a result changed under its lease"
            node.tell(LeasesReturned(action.client, (action.lease,)))

        self.agenda.after(self.rng.random() * self.lease_time, back)

    def failed(self, node: SimulatedNode, action: Fail) -> None:
        """Take an error; from now on the client may write its input."""
        request = self.requests[action.request]
        assert request.node is node
        request.answers.append(action.error)
        if request.source is not None:
            view = node.view(request.source)
            node._check_free(request.source, "the client writes")
            view[:] = 0xEE
            request.source = None

    def run(self) -> None:
        """Run to the end and check what must hold after every run."""
        self.agenda.run()
        for request in self.requests:
            if request.node.alive:
                assert len(request.answers) == 1, (request.rank, request.call, request.answers)
            if request.source is not None and request.call.data is not None:
                assert request.node.view(request.source).tobytes() == request.call.data.tobytes()
        for node in self.nodes.values():
            if node.alive:
                self._check_nothing_left(node)

    def close(self) -> None:
        """Let all groups be forgotten and check that even idle memory goes."""
        for number, group in self.groups.items():
            for member in group.members:
                self.nodes[member.node].later(0.0, GroupForgotten(number))
        self.agenda.run()
        for node in self.nodes.values():
            if node.alive:
                snapshot = node.engine.snapshot()
                assert snapshot["groups"] == {}
                assert snapshot["memory"]["arenas"] == 0, snapshot["memory"]
                assert all(buffer < FIRST_ENGINE_BUFFER for buffer in node.buffers)

    def _check_nothing_left(self, node: SimulatedNode) -> None:
        snapshot = node.engine.snapshot()
        assert snapshot["memory"]["reserved_bytes"] == 0, snapshot
        assert snapshot["leases"] == {}, snapshot
        outstanding = snapshot["outstanding"]
        assert (outstanding["receives"], outstanding["sends"], outstanding["jobs"]) == (0, 0, 0), snapshot
        assert set(node.outstanding().values()) == {0}, node.outstanding()
        for group in snapshot["groups"].values():
            assert group["ending"] == 0, snapshot
            for operation in group["operations"]:
                assert operation["arrivals"] == {}, snapshot

    def _place(self, node: SimulatedNode, data: npt.NDArray[np.generic]) -> Region:
        raw = np.frombuffer(data.tobytes(), np.uint8)
        number = self._next_buffer
        self._next_buffer += 1
        node.buffers[number] = np.concatenate([np.zeros(8, np.uint8), raw])
        return Region(number, 8, len(raw))

    def _start_group(self, number: int, layout: Mapping[str, Sequence[int]], tile_bytes: int) -> None:
        members = sorted(
            (Member(node, 1, tuple(sorted(ranks))) for node, ranks in layout.items()), key=lambda one: one.ranks[0]
        )
        key = GroupKey(self._uids[(number - 1) % len(self._uids)], "job", f"group{number}")
        for mine, member in enumerate(members):
            local = {}
            for rank in member.ranks:
                self._clients[number, rank] = local[rank] = 1000 * number + rank
            started = GroupStarted(number, key, 1, tile_bytes, tuple(members), mine, local)
            self.groups[number] = started
            self.nodes[member.node].later(self.rng.random() * 2e-3, started)


def fingerprint(
    kind: str = "all_reduce",
    dtype: DType = DType.FLOAT32,
    op: Reduction = Reduction.SUM,
    count: int = 100,
    root: int = -1,
    algorithm: str = "",
    shape: str = "",
) -> Fingerprint:
    """Return a fingerprint with the usual values."""
    return Fingerprint(kind, int(dtype), int(op), shape or f"({count},)", count, root, algorithm)
