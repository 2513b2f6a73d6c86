"""The judge itself: what it must find, and what it must let pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from tests.chaos.calls import large_calls, step_calls
from tests.chaos.faults import Expectation, Fault, Kind, expectation
from tests.chaos.records import Failure, Record, parse
from tests.chaos.verdict import judge

PLACES = (0, 0, 1, 2)
LOST = Failure("peer_lost", "gone", ranks=frozenset({3}), nodes=frozenset({"node2"}))


def expected(kind: Kind) -> Expectation:
    fault = Fault(kind, 2, 0, 3)
    return expectation(fault, PLACES, failure_timeout=2.0, deadline=30.0)


def failed(rank: int, t: float, errors: Mapping[str, Failure], got: tuple[str, ...] = ()) -> Record:
    at = {name: replace(error, t=t) for name, error in errors.items()}
    return Record(rank, "step", t + 1.0, "job", 7, frozenset(got), errors=at)


def complaints(records: list[Record], wanted: Expectation, slack: float = 0.5) -> tuple[str, ...]:
    return judge(records, wanted, at=10.0, healed=13.0, slack=slack).complaints


def test_survivors_that_all_name_the_lost_node_in_time_are_fine() -> None:
    records = [failed(rank, 10.1, {"x": LOST}) for rank in (0, 1, 2)]
    assert complaints(records, expected(Kind.KILL_AGENT)) == ()


def test_a_result_here_and_an_error_there_is_found() -> None:
    records = [failed(rank, 10.1, {"x": LOST, "y": LOST}) for rank in (0, 2)]
    records.append(failed(1, 10.1, {"y": LOST}, got=("x",)))
    assert complaints(records, expected(Kind.KILL_AGENT)) == (
        "step 7, x: ranks [1] have a result, others not: {0: 'peer_lost', 2: 'peer_lost'}",
    )


def test_what_a_rank_that_is_cut_off_got_alone_is_no_disagreement() -> None:
    records = [failed(rank, 12.1, {"x": LOST}) for rank in (0, 1, 2)]
    records += [failed(3, 14.0, {"y": LOST}, got=("x",))]
    assert complaints(records, expected(Kind.STOP_AGENT)) == ()


def test_a_rank_that_the_others_left_out_need_not_agree_with_them() -> None:
    wanted = replace(expected(Kind.KILL_AGENT), spared=frozenset({0, 1, 2, 3}), ranks=frozenset())
    records = [failed(rank, 10.1, {"y": LOST}, got=("x",)) for rank in (0, 1, 2)]
    assert complaints([*records, failed(3, 10.1, {"x": LOST, "y": LOST})], wanted) == ()
    cut_off = Failure("peer_lost", "agent 'node2' is cut off from group 'world'", nodes=frozenset({"node2"}))
    assert complaints([*records, failed(3, 10.1, {"x": cut_off})], wanted) == ()
    (found,) = complaints([*records, failed(3, 10.1, {"x": replace(LOST, ranks=frozenset({1}))})], wanted)
    assert found == "step 7, x: ranks [0, 1, 2] have a result, others not: {3: 'peer_lost'}"


def test_late_missing_and_wrongly_named_errors_are_found() -> None:
    other = Failure("peer_lost", "gone", nodes=frozenset({"node1"}))
    records = [failed(0, 10.6, {"x": LOST}), failed(1, 10.1, {"x": other})]
    assert complaints(records, expected(Kind.KILL_AGENT)) == (
        "rank 2 got no error",
        "rank 1 was told of ['node1'], not of ['node2']: gone",
        "rank 0 had its error after 0.600 s, bound 0.5 s",
    )


def test_an_error_of_another_class_or_about_other_ranks_is_found() -> None:
    internal = Failure("internal", "a defect", nodes=frozenset({"node2"}))
    nobody = Failure("rank_lost", "gone", ranks=frozenset({0}), nodes=frozenset({"node2"}))
    records = [failed(0, 10.1, {"x": internal}), failed(1, 10.1, {"x": nobody}), failed(2, 10.1, {"x": nobody})]
    found = complaints(records, expected(Kind.KILL_RANK))
    assert found[0] == "rank 0 got internal nodes=['node2']: a defect, not rank_lost"
    assert "rank 1 was told of ranks [0], not of [3]" in found


def test_a_group_that_works_on_without_the_lost_is_found() -> None:
    records = [failed(rank, 10.1, {"x": LOST}) for rank in (0, 1, 2)]
    records += [Record(0, "over", 10.2, "job", error=replace(LOST, t=10.2)), Record(1, "over", 10.2, "job")]
    assert complaints(records, expected(Kind.KILL_AGENT)) == ("rank 1 could call on after the loss",)


def test_any_error_after_a_fault_that_must_be_survived_is_found() -> None:
    assert complaints([failed(2, 10.1, {"x": LOST})], expected(Kind.CUT)) == (
        "rank 2 got peer_lost ranks=[3] nodes=['node2']: gone",
    )
    assert complaints([failed(2, 10.1, {})], expected(Kind.CUT)) == ()


def test_wrong_values_are_always_found() -> None:
    wrong = Record(0, "step", 10.1, "job", 3, wrong={"x": "tensor 0 has 1 at 5, not 2"})
    assert complaints([wrong], expected(Kind.PAUSE_AGENT)) == (
        "wrong value at rank 0, step 3, x: tensor 0 has 1 at 5, not 2",
    )


def test_the_time_of_who_was_cut_off_counts_from_the_end_of_the_fault() -> None:
    records = [failed(rank, 12.0, {"x": LOST}) for rank in (0, 1, 2)] + [failed(3, 17.6, {"x": LOST})]
    verdict = judge(records, expected(Kind.ISOLATE), at=10.0, healed=13.0, slack=0.5)
    assert verdict.complaints == ("rank 3 had its error after 4.600 s, bound 4.5 s",)
    assert verdict.spared == (2.0, 2.0, 2.0)


def test_lines_of_ranks_are_read_back() -> None:
    line = b'{"event": "step", "t": 1.5, "job": "j", "step": 2, "got": ["a"], "errors": {"b": {"code": "rank_lost", '
    line += b'"message": "m", "t": 1.25, "ranks": [3], "nodes": ["node2"]}}}'
    lost = Failure("rank_lost", "m", 1.25, ranks=frozenset({3}), nodes=frozenset({"node2"}))
    assert parse(1, line) == Record(1, "step", 1.5, "j", 2, frozenset({"a"}), errors={"b": lost})


def test_calls_of_ranks_match_and_one_wrong_element_is_seen() -> None:
    sizes = [4096, 8192]
    for make in (step_calls, large_calls):
        ranks = [make(3, rank, 4, sizes) for rank in range(4)]
        for calls in zip(*(sorted(calls, key=lambda call: call.name) for calls in ranks), strict=True):
            wanted = [call.expected for call in calls]
            assert all(len(arrays) == len(wanted[0]) for arrays in wanted)
            assert all(np.array_equal(a, b) for arrays in wanted for a, b in zip(arrays, wanted[0], strict=True))
            for call in calls:
                copies = [array.copy() for array in call.expected]
                assert call.fault(copies if call.name == "many" else copies[0] if copies else None) == ""
                if copies:
                    copies[-1][-1] += copies[-1].dtype.type(1)
                    assert " at " in call.fault(copies if call.name == "many" else copies[0])
