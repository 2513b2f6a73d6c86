"""What must hold in every run, whatever goes wrong; docs/failure.md has the list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

from tests.simulation.kernels import same_bits
from tests.simulation.whole.history import Request, Seat
from tests.simulation.whole.inputs import data_of, result_of

from allreduced.core.dtypes import DType
from allreduced.core.errors import (
    AgentUnavailable,
    AllReducedError,
    GroupChanged,
    LimitExceeded,
    PeerLost,
    RankLost,
)
from allreduced.protocol.change import Change

if TYPE_CHECKING:
    from tests.simulation.whole.agent import SimulatedAgent
    from tests.simulation.whole.world import World

SLACK = 0.1
"""In failure timeouts: what delays, looks that come a bit late and slow kernels may add to a bound."""


def check_delivery(world: World, seat: Seat, agent: SimulatedAgent) -> None:
    """Check that an agent that delivers has heard from a quorum, by what really came in at its machine."""
    now, timeout = world.agenda.now, world.timeout
    host = world.wire.hosts[seat.node]
    members = seat.members
    votes, departed = set(), set()
    for place, member in enumerate(members):
        if member.node == seat.node:
            votes.add(place)
            continue
        if member.node in seat.departed:
            departed.add(place)
        elif host.heard.get(member.node, -1e9) >= max(now - timeout * (1 + 1e-6), 0.0):
            votes.add(place)
    votes -= departed
    enough = len(votes) == len(members) - len(departed)
    enough = enough or 2 * len(votes) > len(members) or (2 * len(votes) == len(members) and 0 in votes)
    world.history.counts["deliveries"] += 1
    if not enough:
        heard = {name: round(now - at, 4) for name, at in host.heard.items()}
        world.history.violated(
            "3 fresh quorum", f"{seat.node} delivers in {seat.group}, last heard {heard} s ago", seat.group
        )


def check_run(world: World) -> None:
    """Check everything that is about the whole run."""
    _check_ends(world)
    _check_values(world)
    _check_changes(world)
    _check_outcomes(world)
    _check_diverged(world)
    _check_after(world)
    _check_resets(world)
    _check_words(world)


def _check_ends(world: World) -> None:
    """1: exactly one end at each live client, in time."""
    history, timeout = world.history, world.timeout
    for request in history.requests:
        if not request.client.alive or not request.taken:
            continue
        if len(request.answers) != 1:
            history.violated("1 one end", f"{_call(world, request)} ended {len(request.answers)} times", request.group)
            continue
        at = request.answers[0][0]
        late = at - request.deadline
        # Time in which its own agent was stopped does not count.
        late -= sum(
            end - start
            for node, start, end in world.pauses
            if _node(world, request) == node and end > request.submitted
        )
        world.latest = max(world.latest, late)
        calm = max(request.submitted, world.scenario.heal_at, min(history.lost.get(request.group, {0: inf}).values()))
        if at > calm + BOUND * timeout:
            what = f"{_call(world, request)} ended {at - calm:.3f} s after a rank was lost and the network healed"
            history.violated("1 in time", what, request.group)
        if late > BOUND * timeout:
            history.violated(
                "1 in time", f"{_call(world, request)} ended {late:.3f} s after its deadline", request.group
            )


BOUND = 1 + 1.5 + SLACK
"""In failure timeouts: the failure timeout itself, and what a change may take that began before it was over."""


def _check_values(world: World) -> None:
    """2, 4: every result is the reduction of what all ranks gave, bit by bit."""
    history = world.history
    wanted: dict[tuple[int, int], bytes] = {}
    for request in history.requests:
        if not request.has_result:
            continue
        history.counts["results"] += 1
        operation = world.operation(request.operation)
        key = (request.group, request.operation)
        if operation.absent or operation.odd >= 0:
            history.violated(
                "4 reduction of all", f"{_call(world, request)} ended well, which it cannot", request.group
            )
            continue
        if key not in wanted:
            started = next(seat.started for (group, _, _), seat in history.seats.items() if group == request.group)
            dtype = DType(operation.dtype)
            ranks = [rank for member in started.members for rank in member.ranks]
            givers = [operation.root] if operation.root >= 0 else ranks
            inputs = {rank: data_of(request.group, request.operation, rank, dtype, operation.count) for rank in givers}
            wanted[key] = result_of(operation, inputs, [member.ranks for member in started.members])
        answer = request.answers[0][1]
        given = answer if isinstance(answer, bytes) else b""
        if not same_bits(operation.dtype, given, wanted[key]):
            history.violated("2 same bits", f"{_call(world, request)} gave wrong bits", request.group)


def _check_changes(world: World) -> None:
    """All that learn of the end of a generation learn the same."""
    for (group, generation), learned in world.history.changes.items():
        for at, (seat, change, when) in enumerate(learned):
            for earlier, other, _ in learned[:at]:
                # Who left, or died, took its decision with it.
                gone = any(one.gone_at is not None and one.gone_at <= when for one in (earlier, seat))
                if change != other and not gone:
                    what = f"end of generation {generation}: {earlier.node} {other} but {seat.node} {change}"
                    world.history.violated("agreement", what, group)
                    return


def _check_outcomes(world: World) -> None:
    """3: an operation ends the same way on all members that go on together."""
    history = world.history
    by_group: dict[int, list[Seat]] = {}
    for seat in history.seats.values():
        by_group.setdefault(seat.group, []).append(seat)
    for seats in by_group.values():
        operations = {key for seat in seats for key in seat.delivered} & {key for seat in seats for key in seat.failed}
        for key in operations:
            for good in seats:
                if key not in good.delivered:
                    continue
                for bad in seats:
                    if (
                        bad is not good
                        and key in bad.failed
                        and _together(world, good, bad, key)
                        and not _own(bad.failed[key][1])
                    ):
                        what = f"{key} of {good.group}: {good.node} has a result, {bad.node}: {bad.failed[key][1]}"
                        history.violated("3 one outcome", what, good.group)


def _together(world: World, good: Seat, bad: Seat, key: tuple[str, int]) -> bool:
    """Tell whether two members went on together after one of them ended the operation."""
    if bad.cut_off is not None and bad.failed[key][2] >= bad.cut_off:
        return False  # it left the group first, and the error says so
    ended = bad.failed[key][2]
    if any(at is not None and at < ended for at in (good.gone_at, good.cut_off)):
        return False  # it cannot give the result to anybody any more, and who else had it may be gone as well
    if any(at <= ended and good.node not in _nodes(change) for change, at in bad.installed.values()):
        return False  # the others went on without it before they had the result from it; it must learn so
    generation = min(good.delivered[key][0], bad.failed[key][0])
    for end, (change, _) in good.installed.items():
        if end >= generation and end in bad.installed:
            return bad.installed[end][0] == change  # where they differ one went on alone, and that is judged by itself
    if any((seat.group, seat.generation) in world.history.changes for seat in (good, bad)):
        return False  # the others went on without one of them
    ended = max(good.delivered[key][1], ended)
    return all(seat.cut_off is None and (seat.gone_at is None or seat.gone_at > ended) for seat in (good, bad))


def _nodes(change: Change) -> frozenset[str]:
    return frozenset(member.node for member in change.members)


def _own(error: AllReducedError) -> bool:
    """Tell whether an error is about one client only."""
    return isinstance(error, LimitExceeded) and "lease" in str(error)


def _check_diverged(world: World) -> None:
    """3: who got a result that the others did not keep learns so before it gets any later one."""
    history = world.history
    for seat in history.seats.values():
        if seat.learned is None or not seat.agent.alive:
            continue
        change, at = seat.learned
        kept = {(result.name, result.use) for result in change.results}
        others = [
            other
            for other in history.seats.values()
            if other.group == seat.group and other is not seat and change.generation - 1 in other.installed
        ]
        lost = [
            key for key in seat.delivered if key not in kept and others and any(key in other.failed for other in others)
        ]
        if not lost:
            continue
        history.counts["diverged"] += 1
        for request in history.requests:
            if request.seat is not seat or not request.answers or not request.client.alive:
                continue
            when, answer = request.answers[0]
            if when > at and not isinstance(answer, AllReducedError):
                history.violated(
                    "3 diverged", f"{_call(world, request)} gives a result after {seat.node} diverged in {lost}"
                )
            elif request.submitted > at and not (isinstance(answer, GroupChanged) and answer.diverged):
                history.violated("3 diverged", f"{_call(world, request)} does not say that {lost} diverged: {answer!r}")


def _check_after(world: World) -> None:
    """6: once everything is healed, a group of all processes forms and works."""
    history = world.history
    requests = [request for request in history.requests if request.operation < 0]
    missing = len(world.clients) - sum(request.has_result for request in requests)
    if missing:
        refused = [
            f"{client.name}: {error}"
            for client in world.clients.values()
            for name, error in client.refusals
            if name == "after"
        ]
        errors = [f"{request.rank}: {request.error!r}" for request in requests if not request.has_result]
        history.violated("6 works after", f"{missing} of {len(world.clients)} ranks got nothing {errors} {refused}")


def _check_resets(world: World) -> None:
    """Links that are reset, and what is soon over, cost nobody anything; without faults nothing changes at all."""
    history, faults = world.history, world.scenario.faults
    short = world.timeout / 4
    for fault in faults:
        passes = fault.kind in ("pause", "part", "oneway") and 0 < fault.seconds < short
        if fault.kind != "cut" and not passes:
            return
    if history.counts["PeerDown"]:
        history.violated("7 resets are harmless", "an agent is called dead")
    if not faults and history.changes:
        history.violated("7 resets are harmless", "a generation ended without a fault")
    seats = Counter(group for group, _, _ in history.seats)
    for request in history.requests:
        if request.seat is None or seats[request.group] < len(request.seat.started.members):
            continue  # the links were reset while the group formed, and it did not everywhere
        operation = world.operation(request.operation)
        # Where everything is well an operation takes some milliseconds.
        plain = not operation.absent and operation.odd < 0 and operation.deadline > 5 * world.timeout
        if plain and not request.has_result:
            history.violated("7 resets are harmless", f"{_call(world, request)}: {request.error}", request.group)


def _node(world: World, request: Request) -> str:
    return request.seat.node if request.seat is not None else ""


def _check_words(world: World) -> None:
    """Where one process, or one agent, is killed and nothing else happens, the errors name it."""
    history, faults = world.history, world.scenario.faults
    if len(faults) != 1 or faults[0].kind not in ("crash", "kill", "power") or faults[0].node.startswith("@"):
        return
    fault = faults[0]
    seats = Counter(group for group, _, _ in history.seats)
    for request in history.requests:
        if request.seat is None or seats[request.group] < len(request.seat.started.members):
            continue  # it was killed while the group formed
        operation = world.operation(request.operation)
        error = request.error
        plain = not operation.absent and operation.odd < 0 and operation.deadline > 5 * world.timeout
        if error is None or not plain or not request.client.alive or isinstance(error, AgentUnavailable):
            continue
        name = request.seat.started.key.name
        places = next((group.ranks for group in world.scenario.groups if group.name == name), ())
        one = fault.kind == "kill"
        lost = {
            rank for rank, (node, slot) in enumerate(places) if node == fault.node and (not one or slot == fault.slot)
        }
        wanted = RankLost if one else PeerLost
        if not isinstance(error, wanted) or fault.node not in error.nodes or not set(error.ranks) <= lost:
            history.violated("7 who is lost", f"{_call(world, request)}, lost ranks {lost}: {error!r}", request.group)


def _call(world: World, request: Request) -> str:
    operation = world.operation(request.operation)
    where = request.seat.node if request.seat is not None else "?"
    return f"{operation.kind}({request.name!r}, use {request.use}) of rank {request.rank} on {where}"


def names(violations: Iterable[tuple[str, str]]) -> list[str]:
    """Return the invariants that were violated, in order, each once."""
    return list(dict.fromkeys(invariant for invariant, _ in violations))
