"""Judges what the ranks said of a fault: no wrong value, one outcome, everybody in time, the right ones named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.faults import Expectation
from tests.chaos.records import Failure, Record

LATER = frozenset({"group_changed"})
"""Errors that calls after the first failed ones may have too."""
CLUSTER = frozenset({"peer_lost", "rank_lost", "group_changed", "deadline_exceeded", "agent_unavailable"})
"""Errors that are nobody's own fault."""


@dataclass(frozen=True)
class Verdict:
    """What was found.

    ``complaints``: what is wrong. ``spared``: seconds from the fault to the first error of each rank that was spared;
    ``cut_off``: from its end to that of each rank that was cut off, less than 0 where it had one before.
    """

    complaints: tuple[str, ...]
    spared: tuple[float, ...] = ()
    cut_off: tuple[float, ...] = ()


def judge(
    records: Sequence[Record],
    expected: Expectation,
    *,
    at: float,
    healed: float,
    local: frozenset[int] = frozenset(),
    slack: float,
) -> Verdict:
    """Judge what was said in one group. The fault was at ``at`` and over at ``healed``, on the monotonic clock.

    ``local``: ranks whose own agent was killed: they are told so, and nobody else's name. ``slack``: seconds that
    everything may take longer than it must on a machine that has nothing else to do.
    """
    complaints = [*_wrong_values(records)]
    first = _first_errors(records)
    if expected.survives:
        complaints += [f"rank {rank} got {error}" for rank, (_, error) in first.items()]
        return Verdict(tuple(complaints))
    complaints += _disagreements(records, expected.spared - _left_out(first))
    complaints += _missing(first, expected.spared | expected.cut_off | local)
    complaints += _misnamed(first, expected)
    complaints += _called_on(records, expected)
    for rank in sorted((expected.cut_off | local) & first.keys()):
        error = first[rank][1]
        wanted = {"agent_unavailable"} if rank in local else CLUSTER
        if error.code not in wanted:
            complaints.append(f"rank {rank} got {error}")
    spared = {rank: first[rank][0] - at for rank in expected.spared | local if rank in first}
    cut_off = {rank: first[rank][0] - healed for rank in expected.cut_off if rank in first}
    for times, bound in ((spared, expected.bound + slack), (cut_off, expected.late_bound + slack)):
        complaints += [
            f"rank {rank} had its error after {t:.3f} s, bound {bound:g} s" for rank, t in times.items() if t > bound
        ]
    return Verdict(tuple(complaints), tuple(spared.values()), tuple(cut_off.values()))


def _wrong_values(records: Iterable[Record]) -> Iterator[str]:
    for record in records:
        for name, what in record.wrong.items():
            yield f"wrong value at rank {record.rank}, step {record.step}, {name}: {what}"


def _first_errors(records: Iterable[Record]) -> dict[int, tuple[float, Failure]]:
    """Return when each rank had an error first, and which."""
    first: dict[int, tuple[float, Failure]] = {}
    for record in records:
        errors = [*record.errors.values(), *([record.error] if record.error is not None else [])]
        if errors and record.rank not in first:
            earliest = min(errors, key=lambda error: error.t)
            first[record.rank] = earliest.t, earliest
    return first


def _left_out(first: Mapping[int, tuple[float, Failure]]) -> frozenset[int]:
    """Return the ranks that do not go on with the others: they are told that they are lost, or cut off."""
    return frozenset(
        rank
        for rank, (_, error) in first.items()
        if error.code == "peer_lost" and (rank in error.ranks or "is cut off from" in error.message)
    )


def _disagreements(records: Iterable[Record], ranks: frozenset[int]) -> Iterator[str]:
    """Find operations that one of ``ranks`` has a result of and another one an error."""
    got: dict[tuple[int, str], set[int]] = {}
    failed: dict[tuple[int, str], dict[int, str]] = {}
    for record in records:
        if record.rank in ranks:
            for name in record.got:
                got.setdefault((record.step, name), set()).add(record.rank)
            for name, error in record.errors.items():
                failed.setdefault((record.step, name), {})[record.rank] = error.code
    for key in sorted(got.keys() & failed.keys()):
        step, name = key
        yield f"step {step}, {name}: ranks {sorted(got[key])} have a result, others not: {failed[key]}"


def _called_on(records: Iterable[Record], expected: Expectation) -> Iterator[str]:
    """Find spared ranks that could go on with a group that has lost a member."""
    if expected.code in ("peer_lost", "rank_lost"):
        for record in records:
            if record.event == "over" and record.rank in expected.spared:
                if record.error is None:
                    yield f"rank {record.rank} could call on after the loss"
                elif record.error.code not in (expected.code, *LATER):
                    yield f"a further call of rank {record.rank} got {record.error}"


def _missing(first: dict[int, tuple[float, Failure]], ranks: frozenset[int]) -> Iterator[str]:
    for rank in sorted(ranks - first.keys()):
        yield f"rank {rank} got no error"


def _misnamed(first: dict[int, tuple[float, Failure]], expected: Expectation) -> Iterator[str]:
    """Find spared ranks whose error is not the right one, or names the wrong ones."""
    nodes = {f"node{node}" for node in expected.nodes}
    for rank in sorted(expected.spared & first.keys()):
        error = first[rank][1]
        if error.code not in (expected.code, *LATER):
            yield f"rank {rank} got {error}, not {expected.code}"
        elif nodes and not (error.nodes and error.nodes <= nodes):
            yield f"rank {rank} was told of {sorted(error.nodes)}, not of {sorted(nodes)}: {error.message}"
        elif expected.ranks and not expected.ranks <= (error.ranks | error.missing):
            told = sorted(error.ranks | error.missing)
            yield f"rank {rank} was told of ranks {told}, not of {sorted(expected.ranks)}"
