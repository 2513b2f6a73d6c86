"""Connections of strangers are accepted at a bounded rate, good ones at once."""

from __future__ import annotations

from allreduced.core.accept_budget import LONGEST_WAIT, AcceptBudget


def test_good_connections_never_wait() -> None:
    budget = AcceptBudget(rate=10.0, burst=5.0)
    for at in range(1000):
        assert budget.wait(at / 1000) == 0.0
        budget.take(at / 1000)
        budget.give_back()


def test_bad_connections_come_at_the_rate_after_a_burst() -> None:
    budget = AcceptBudget(rate=10.0, burst=5.0)
    now, accepted = 100.0, 0
    while now < 110.0:
        wait = budget.wait(now)
        if wait:
            now += wait + 1e-9
        else:
            budget.take(now)
            accepted += 1
    assert 100 <= accepted <= 106


def test_many_good_ones_at_once_wait_until_the_first_are_known() -> None:
    budget = AcceptBudget(rate=10.0, burst=5.0)
    budget.wait(50.0)
    for _ in range(5):
        assert budget.wait(50.0) == 0.0
        budget.take(50.0)
    assert budget.wait(50.0) > 0.0
    for _ in range(5):
        budget.give_back()
        assert budget.wait(50.0) == 0.0
        budget.take(50.0)
        assert budget.wait(50.0) > 0.0


def test_many_that_are_accepted_at_once_are_waited_for() -> None:
    budget = AcceptBudget(rate=10.0, burst=5.0)
    for _ in range(25):
        budget.take(0.0)
    assert budget.wait(0.0) == LONGEST_WAIT  # they may be known by then
    assert budget.wait(2.0) > 0.0
    assert budget.wait(2.2) == 0.0


def test_the_wait_ends_when_those_before_are_known() -> None:
    budget = AcceptBudget(rate=10.0, burst=5.0)
    for _ in range(25):
        budget.take(0.0)
    for _ in range(21):
        assert budget.wait(0.0) > 0.0
        budget.give_back()
    assert budget.wait(0.0) == 0.0


def test_what_is_not_used_is_saved_up_to_the_burst_only() -> None:
    budget = AcceptBudget(rate=10.0, burst=5.0)
    budget.wait(1e6)
    for _ in range(5):
        budget.give_back()  # of connections that were accepted long ago
    for _ in range(5):
        budget.take(1e6)
    assert budget.wait(1e6) > 0.0
