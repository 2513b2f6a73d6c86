"""What an agent tells about itself, made of what its parts know. Pure: nothing is asked and nothing is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from allreduced.core.errors import AllReducedError, to_wire
from allreduced.core.identity import GroupKey
from allreduced.core.limits import MAX_SECONDS
from allreduced.daemon.engine.snapshot import GroupInfo, HeldInfo, OperationInfo
from allreduced.daemon.engine.snapshot import Snapshot as EngineSnapshot
from allreduced.daemon.membership.instance import GatheringView, GroupView, State
from allreduced.daemon.membership.instance import Snapshot as MembershipSnapshot
from allreduced.daemon.ports import ReachablePeer
from allreduced.protocol.peer import Call
from allreduced.protocol.status import (
    MAX_CALLS,
    MAX_OPERATIONS,
    AgentReport,
    CallReport,
    ClaimReport,
    FailedReport,
    GatheringReport,
    GroupReport,
    HiddenReport,
    OperationReport,
    PeerReport,
    ProcessReport,
    fit,
)
from allreduced.protocol.wire_error import bounded

ROOT = 0

MAX_WAY = 300
"""Characters that are told about what carries the data of a link; the log has all."""


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """Who the agent is. ``uid``: whom it runs as. ``uptime`` in seconds. ``advertised``: where others dial it."""

    node: str
    incarnation: int
    pid: int
    uid: int
    uptime: float
    clients: int
    release: str = ""
    advertised: str = ""


def sees_everything(asker: int, agent: int) -> bool:
    """Return whether a user is told the details of all users' groups. Both are uids."""
    return asker in (ROOT, agent)


def make_report(
    asker: int,
    facts: AgentFacts,
    engine: EngineSnapshot,
    membership: MembershipSnapshot,
    peers: Sequence[ReachablePeer],
    state_of: Callable[[int], str],
    now: float,
) -> AgentReport:
    """Return what the user ``asker`` is told about the agent, bounded so that it fits into a message.

    ``state_of``: what a client's process does. ``now``: the time of the clock that membership is on.
    """
    everything = sees_everything(asker, facts.uid)

    def shown(key: GroupKey) -> bool:
        return everything or key.uid == asker

    formed = [group for group in membership.groups if group.state != State.PROPOSED.value]
    keys = [group.key for group in formed] + [gathering.key for gathering in membership.gatherings]
    hidden = Counter(key.uid for key in keys if not shown(key))
    groups = [_group(group, engine["groups"].get(group.group), state_of) for group in formed if shown(group.key)]
    gatherings = [_gathering(gathering, now) for gathering in membership.gatherings if shown(gathering.key)]
    return fit(
        AgentReport(
            node=facts.node,
            incarnation=facts.incarnation,
            pid=facts.pid,
            uid=facts.uid,
            uptime=_seconds(facts.uptime),
            clients=facts.clients,
            peers=tuple(
                PeerReport(
                    peer.node,
                    peer.incarnation,
                    peer.address or peer.remote,
                    _seconds(peer.silence),
                    peer.transport,
                    _short(peer.way),
                )
                for peer in peers
            ),
            groups=tuple(sorted(groups, key=lambda group: (group.key, group.group))),
            gatherings=tuple(sorted(gatherings, key=lambda gathering: gathering.key)),
            hidden=tuple(HiddenReport(uid, count) for uid, count in sorted(hidden.items())),
            left_out=0,
            release=facts.release,
            advertised=facts.advertised,
        )
    )


def _group(view: GroupView, info: GroupInfo | None, state_of: Callable[[int], str]) -> GroupReport:
    error = view.error or (info["error"] if info is not None else None)
    code, reason = _told(error)
    operations: list[OperationReport] = []
    failed: list[FailedReport] = []
    if info is not None:
        # The longest waiting first: these say most, and there may be more than can be told.
        oldest = sorted(info["operations"], key=lambda operation: -operation["age"])
        operations = [*_held(info["held"]), *(_operation(operation, view.awaited) for operation in oldest)]
        failed = [
            FailedReport(one["name"], one["use"], *_told(one["error"]), tuple(one["waiting"])) for one in info["failed"]
        ]
    return GroupReport(
        group=view.group,
        key=view.key,
        state="broken" if error is not None else view.state,
        generation=info["generation"] if info is not None else view.generation,
        size=view.size,
        members=view.members,
        ranks=tuple(ProcessReport(rank, pid, state_of(client)) for rank, client, pid in view.local),
        left=view.left,
        error=code,
        reason=reason,
        operations=tuple(operations[:MAX_OPERATIONS]),
        failed=tuple(failed[:MAX_OPERATIONS]),
        more=max(len(operations) - MAX_OPERATIONS, 0) + (info["more"] if info is not None else 0),
    )


def _operation(info: OperationInfo, awaited: tuple[str, ...]) -> OperationReport:
    """``awaited``: whom the members' agreement on a change waits for, which only the memberships know."""
    left = info["deadline_in"]
    return OperationReport(
        name=info["name"],
        use=info["use"],
        state=info["state"],
        age=_seconds(info["age"]),
        deadline=MAX_SECONDS if left is None else _seconds(left),
        calls=_calls(info["calls"]),
        arrivals=tuple((rank, _seconds(info["age"] - after)) for rank, after in info["arrivals"].items()),
        missing=tuple(info["missing"]),
        waits_for=info["waits_for"],
        nodes=awaited if info["waits_for"] == "change" else tuple(info["nodes"]),
    )


def _held(held: Iterable[HeldInfo]) -> list[OperationReport]:
    """Return the calls that wait until names are forgotten, as operations that have not begun, one per name."""
    by_name: dict[str, list[HeldInfo]] = {}
    for one in held:
        by_name.setdefault(one["name"], []).append(one)
    return [
        OperationReport(
            name=name,
            use=0,
            state="held",
            age=0.0,
            deadline=_seconds(min(one["deadline_in"] for one in calls)),
            calls=_calls(tuple(Call(one["fingerprint"], (one["rank"],)) for one in calls)),
            arrivals=(),
            missing=(),
            waits_for="names",
            nodes=tuple(calls[0]["nodes"]),
        )
        for name, calls in by_name.items()
    ]


def _calls(calls: Sequence[Call]) -> tuple[CallReport, ...]:
    return tuple(
        CallReport(call.kind, call.dtype, call.op, call.shape, call.count, call.root, call.algorithm, one.ranks)
        for one in calls[:MAX_CALLS]
        for call in [one.fingerprint]
    )


def _gathering(view: GatheringView, now: float) -> GatheringReport:
    claims = tuple(ClaimReport(rank, node, pid, _seconds(now - since)) for rank, node, pid, since in view.ranks)
    return GatheringReport(view.key, view.size, claims, view.silent)


def _told(error: AllReducedError | None) -> tuple[str, str]:
    """Return code and message of an error, within the limits of a message."""
    if error is None:
        return "", ""
    code, message, _, _ = bounded(to_wire(error))
    return code, message


def _short(text: str) -> str:
    """Return a text that leaves room for everything else, though another agent may have written it."""
    return text if len(text) <= MAX_WAY else f"{text[: MAX_WAY - 1]}…"


def _seconds(value: float) -> float:
    return min(max(value, 0.0), MAX_SECONDS)
