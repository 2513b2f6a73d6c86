from __future__ import annotations

from allreduced.daemon.activity import Call, describe, describe_all

BARRIER = Call(7, "barrier", "", 0.5)


def test_what_a_client_did_in_a_group() -> None:
    assert describe(None, []) == "before its first call"
    assert describe(BARRIER, []) == "between operations: the last one that it called was barrier (its call 7)"
    assert describe(BARRIER, [BARRIER]) == "while it waited for barrier (its call 7), for 0.5 s"


def test_many_calls_are_counted_and_the_first_one_tells_the_time() -> None:
    calls = [Call(number, "all_reduce", f"layer{number}", 12.3456 - number) for number in range(1, 6)]
    assert describe(calls[-1], calls) == (
        "while it waited for all_reduce 'layer1' (its call 1), all_reduce 'layer2' (its call 2), "
        "all_reduce 'layer3' (its call 3) and 2 more, for 11.3 s"
    )


def test_several_groups_are_named() -> None:
    assert describe_all([]) == ""
    assert describe_all([("world", "before its first call")]) == "before its first call"
    assert describe_all([("a", "before its first call"), ("b", "between operations")]) == (
        "in group 'a' before its first call; in group 'b' between operations"
    )
