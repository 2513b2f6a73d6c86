"""Engines that are joined without a network, without memory and without time: only what they decide is real.

Arenas exist at once, kernels and sends are done as soon as they are asked for, and no byte is ever touched. So tensors
may be of any size, and what is measured is the engines' own work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from allreduced.core.errors import AllReducedError
from allreduced.core.identity import GroupKey, Member
from allreduced.daemon.engine.actions import (
    Action,
    CancelReceive,
    CancelSend,
    CreateArena,
    Deliver,
    DestroyArena,
    Fail,
    PostReceive,
    Reduce,
    Send,
    SendFrame,
    SetTimer,
)
from allreduced.daemon.engine.engine import Engine
from allreduced.daemon.engine.events import (
    ArenaReady,
    Event,
    FrameArrived,
    GroupStarted,
    LeasesReturned,
    ReceiveCancelled,
    Received,
    Reduced,
    Sent,
    Submitted,
    TimePassed,
)
from allreduced.daemon.engine.limits import Limits
from allreduced.daemon.engine.region import Region
from allreduced.protocol import peer
from allreduced.protocol.peer import Fetch, Fingerprint, MoreGrants, Ready

GROUP = 7
KEY = GroupKey(1000, "job", "world")


@dataclass(slots=True)
class BareNode:
    """One engine, the sizes of its arenas, and what it did."""

    name: str
    engine: Engine
    arenas: dict[int, int] = field(default_factory=dict)
    posted: dict[int, PostReceive] = field(default_factory=dict)
    reduced: list[Reduce] = field(default_factory=list)
    sent: list[Send] = field(default_factory=list)
    peak_bytes: int = 0


class BareCluster:
    """One group over nodes with ``ranks_per_node`` ranks each.

    ``keep``: remember every reduction and every send. ``hold``: leases are not given back until :meth:`give_back`.
    """

    def __init__(
        self,
        nodes: int,
        ranks_per_node: int = 1,
        limits: Limits | None = None,
        *,
        tile_bytes: int = 1 << 20,
        keep: bool = False,
        hold: bool = False,
    ) -> None:
        # Nobody falls silent, and what waits for a moment comes at once.
        timeless = replace(limits or Limits(), failure_timeout=inf, confirm_seconds=0.0)
        self.now = 0.0
        self.results: dict[int, Deliver | AllReducedError] = {}
        """By request: how it ended."""
        self.handled = 0
        self._keep = keep
        self._hold = hold
        self._leases: list[tuple[str, int, int]] = []
        self._queue: deque[tuple[str, Event]] = deque()
        self._next = 0
        self.members = tuple(
            Member(f"n{node}", 1, tuple(range(node * ranks_per_node, (node + 1) * ranks_per_node)))
            for node in range(nodes)
        )
        self.nodes: Mapping[str, BareNode] = {
            member.node: BareNode(member.node, Engine(member.node, timeless)) for member in self.members
        }
        self._node_of = {rank: member.node for member in self.members for rank in member.ranks}
        for mine, member in enumerate(self.members):
            local = {rank: 100 + rank for rank in member.ranks}
            self.tell(member.node, GroupStarted(GROUP, KEY, 1, tile_bytes, self.members, mine, local))

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks."""
        return range(len(self._node_of))

    def submit(self, rank: int, name: str, fingerprint: Fingerprint, nbytes: int, deadline_at: float = 1e9) -> int:
        """Let a rank call an operation; return its request. Call :meth:`run` for what follows from it."""
        self._next += 1
        source = Region(rank + 1, 0, nbytes) if nbytes else None
        submitted = Submitted(100 + rank, self._next, GROUP, rank, name, fingerprint, source, deadline_at, 0)
        self._queue.append((self._node_of[rank], submitted))
        return self._next

    def tell(self, node: str, event: Event) -> None:
        """Give one engine an event, and do all that follows from it."""
        self._queue.append((node, event))
        self.run()

    def run(self) -> None:
        """Handle what is queued, and all that follows from it."""
        queue = self._queue
        while queue:
            name, event = queue.popleft()
            node = self.nodes[name]
            self.handled += 1
            for action in node.engine.handle(event, self.now):
                self._do(node, action)

    def give_back(self) -> None:
        """Give all leases back."""
        leases, self._leases = self._leases, []
        for node, client, lease in leases:
            self._queue.append((node, LeasesReturned(client, (lease,))))
        self.run()

    def _do(self, node: BareNode, action: Action) -> None:
        queue, name = self._queue, node.name
        match action:
            case CreateArena(buffer=buffer, nbytes=nbytes):
                node.arenas[buffer] = nbytes
                node.peak_bytes = max(node.peak_bytes, sum(node.arenas.values()))
                queue.append((name, ArenaReady(buffer)))
            case DestroyArena(buffer=buffer):
                del node.arenas[buffer]
            case Reduce(job=job):
                if self._keep:
                    node.reduced.append(action)
                queue.append((name, Reduced(job)))
            case PostReceive(receive=receive):
                node.posted[receive] = action
            case CancelReceive(receive=receive):
                node.posted.pop(receive, None)
                queue.append((name, ReceiveCancelled(receive)))
            case Send(send=send, node=target, token=token, offset=offset, region=region, tag=tag):
                if self._keep:
                    node.sent.append(action)
                queue.append((target, Received(int(token), offset, region.nbytes, tag)))
                queue.append((name, Sent(send)))
            case SendFrame(node=target, frame=frame):
                if isinstance(frame, Fetch | MoreGrants | Ready):
                    grants = tuple(replace(grant, token=str(grant.receive).encode()) for grant in frame.grants)
                    frame = replace(frame, grants=grants)
                decoded = peer.decode(peer.encode(frame)) if self._keep else frame
                queue.append((target, FrameArrived(name, decoded)))  # type: ignore[arg-type] # the frame that was sent
            case Deliver(client=client, request=request, lease=lease):
                assert request not in self.results
                self.results[request] = action
                if lease and self._hold:
                    self._leases.append((name, client, lease))
                elif lease:
                    queue.append((name, LeasesReturned(client, (lease,))))
            case Fail(request=request, error=error):
                assert request not in self.results
                self.results[request] = error
            case CancelSend():
                pass  # it is done already
            case SetTimer(at=at) if at is not None and at <= self.now:
                queue.append((name, TimePassed()))
            case _:
                pass  # timers: no time passes
