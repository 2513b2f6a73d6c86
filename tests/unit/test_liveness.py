"""Who lives: links, frames, silence, and this agent's own stalls."""

from __future__ import annotations

import random

import pytest

from allreduced.core.errors import AgentUnavailable, PeerLost
from allreduced.daemon.membership.events import LinkLost, PeerDown, PeerUp
from allreduced.daemon.membership.liveness import FORGOTTEN, TABLE, Liveness, PeerState, Sign, Verdict
from allreduced.daemon.timing import derived

T = 8.0
TIMING = derived(T)  # heartbeat 1, tolerance 0.5


def up(node: str = "b", incarnation: int = 7, now: float = 0.0) -> Liveness:
    liveness = Liveness(TIMING)
    assert liveness.link_up(node, incarnation, now) == (PeerUp(node, incarnation),)
    return liveness


def run(liveness: Liveness, until: float) -> list[tuple[float, Verdict]]:
    """Look whenever it is due; return what was found, and when."""
    found: list[tuple[float, Verdict]] = []
    while liveness.next_look is not None and liveness.next_look <= until:
        now = liveness.next_look
        found += [(now, verdict) for verdict in liveness.look(now).verdicts]
    return found


def down(verdicts: tuple[Verdict, ...] | list[tuple[float, Verdict]]) -> PeerDown:
    last = verdicts[-1]
    verdict = last[1] if isinstance(last, tuple) else last
    assert isinstance(verdict, PeerDown)
    return verdict


def test_a_silent_peer_is_declared_dead_when_the_timeout_is_over() -> None:
    liveness = up()
    liveness.heard("b", 3.3)
    ((at, _),) = found = run(liveness, 20.0)
    assert at == 3.3 + T
    verdict = down(found)
    assert (verdict.node, verdict.proven) == ("b", False)
    assert isinstance(verdict.error, PeerLost)
    assert "silent for 8.0 s" in verdict.error.message
    assert liveness.state("b") is PeerState.SILENT
    assert liveness.next_look is None
    assert liveness.wanted == ("b",)


@pytest.mark.parametrize("seed", range(20))
def test_death_by_silence_comes_at_most_a_sixteenth_late_and_never_early(seed: int) -> None:
    rng = random.Random(seed)
    liveness, now, heard = up(), 0.0, 0.0
    for _ in range(rng.randrange(1, 30)):  # looks come up to the tolerance late
        assert liveness.next_look is not None
        now = max(now, liveness.next_look) + rng.random() * TIMING.tolerance * 0.9
        heard = now - rng.random() * 0.5
        liveness.heard("b", heard)
        assert liveness.look(now).verdicts == ()
    while not (look := liveness.look(now)).silent:
        assert liveness.next_look is not None
        now = liveness.next_look + rng.random() * TIMING.tolerance * 0.9
    assert heard + T <= now <= heard + T + T / 16
    assert look.silent == ("b",)


def test_any_sign_of_life_counts_and_late_news_of_old_ones_do_not() -> None:
    liveness = up()
    for at in (4.0, 2.0):
        liveness.heard("b", at)
    liveness.heard("nobody", 5.0)
    assert liveness.silence("b", 5.0) == 1.0
    assert liveness.silence("nobody", 5.0) == float("inf")


def test_quiet_links_get_heartbeats_and_busy_ones_do_not() -> None:
    liveness = up()
    liveness.link_up("c", 1, 0.0)
    liveness.sent("c", 0.75)
    assert liveness.next_look == 1.0
    assert liveness.look(1.0).heartbeats == ("b",)
    assert liveness.next_look == 1.75
    assert liveness.look(1.75).heartbeats == ("c",)
    assert liveness.look(1.8).heartbeats == ()


def test_a_peer_with_a_shorter_timeout_gets_heartbeats_as_often_as_it_needs_them() -> None:
    liveness = up()
    liveness.keep_pace("b", 3.0, 0.0)  # longer than here
    liveness.keep_pace("nobody", 0.1, 0.0)
    assert liveness.next_look == 1.0
    liveness.keep_pace("b", 0.25, 0.0)
    assert liveness.next_look == 0.25
    assert liveness.look(0.25).heartbeats == ("b",)
    assert liveness.next_look == 0.5
    liveness.link_ended("b", 0.5)
    liveness.link_up("b", 1, 0.5)  # perhaps with other settings, which it tells again
    assert liveness.look(0.75).heartbeats == ()


def test_a_heartbeat_that_was_due_before_its_pace_was_told_is_no_stall() -> None:
    liveness = up()
    liveness.keep_pace("b", 0.25, 0.8)
    assert liveness.next_look == 0.8
    look = liveness.look(0.8)
    assert (look.heartbeats, look.stall) == (("b",), 0.0)


def test_a_stall_of_this_agent_is_charged_to_nobody() -> None:
    liveness = up()
    for second in range(1, 5):
        liveness.heard("b", float(second))
        liveness.look(float(second))
    look = liveness.look(100.0)  # stopped at 4, and goes on at 100: due was 5
    assert (look.verdicts, look.stall) == ((), 95.0)
    assert liveness.silence("b", 100.0) == 1.0
    ((at, _),) = run(liveness, 200.0)
    assert at == 107.0


def test_what_came_in_after_a_stall_gives_no_credit_for_the_future() -> None:
    liveness = up()
    liveness.look(1.0)
    liveness.heard("b", 49.9)  # read before the look
    liveness.look(50.0)
    assert liveness.silence("b", 50.0) == 0.0
    ((at, _),) = run(liveness, 200.0)
    assert at == 58.0


def test_a_link_that_ends_during_a_stall_leaves_time_to_dial() -> None:
    liveness = up()
    liveness.look(1.0)
    assert liveness.link_ended("b", 50.0) == (LinkLost("b"),)
    assert liveness.look(50.0).verdicts == ()
    assert liveness.state("b") is PeerState.CUT


def test_a_link_that_ended_proves_nothing_and_may_come_back() -> None:
    liveness = up()
    assert liveness.link_ended("b", 2.0) == (LinkLost("b"),)
    assert list(liveness.wanted) == ["b"]
    assert liveness.link_up("b", 7, 3.0) == (PeerUp("b", 7),)
    assert list(liveness.wanted) == []
    assert run(liveness, 10.9) == []


def test_a_link_that_does_not_come_back_is_silence_since_it_was_last_heard() -> None:
    liveness = up()
    liveness.heard("b", 1.5)
    liveness.link_ended("b", 2.0, AgentUnavailable("connection reset"))
    ((at, _),) = found = run(liveness, 20.0)
    assert at == 1.5 + T
    error = down(found).error
    assert error is not None
    assert "after its link ended: connection reset" in error.message


def test_refused_is_a_proof_only_without_a_link() -> None:
    liveness = up()
    assert liveness.refused("b", 1.0) == ()
    liveness.link_ended("b", 2.0)
    verdict = down(liveness.refused("b", 2.1))
    assert verdict.proven
    assert "refuses connections" in str(verdict.error)
    assert liveness.state("b") is None
    assert liveness.refused("b", 2.2) == liveness.refused("nobody", 2.2) == ()


def test_silence_becomes_proof_when_the_address_refuses() -> None:
    liveness = up()
    run(liveness, 20.0)
    assert down(liveness.refused("b", 21.0)).proven


@pytest.mark.parametrize("before", ["up", "cut", "silent"])
def test_a_newer_incarnation_proves_the_death_of_the_old_one(before: str) -> None:
    liveness = up()
    if before == "cut":
        liveness.link_ended("b", 1.0)
    elif before == "silent":
        run(liveness, 20.0)
    verdicts = liveness.link_up("b", 8, 21.0)
    assert down(verdicts[:1]).proven
    assert verdicts[1:] == (PeerUp("b", 8),)
    assert not liveness.welcome("b", 7)
    assert liveness.link_up("b", 7, 22.0) == ()
    assert liveness.welcome("b", 8)


def test_a_second_link_in_place_of_the_first_may_have_lost_frames() -> None:
    assert up().link_up("b", 7, 1.0) == (LinkLost("b"), PeerUp("b", 7))


@pytest.mark.parametrize("end", ["ended", "silent"])
def test_after_a_goodbye_the_peer_has_left(end: str) -> None:
    liveness = up()
    assert liveness.goodbye("b", 1.0) == ()
    verdicts = liveness.link_ended("b", 2.0) if end == "ended" else tuple(verdict for _, verdict in run(liveness, 9.0))
    assert verdicts == (PeerDown("b", None, proven=True),)
    assert liveness.state("b") is None


def test_a_silent_peer_that_comes_back_is_up_again() -> None:
    liveness = up()
    run(liveness, 20.0)
    assert liveness.link_up("b", 7, 30.0) == (PeerUp("b", 7),)
    assert run(liveness, 37.9) == []


def test_time_that_goes_backwards_harms_nobody() -> None:
    liveness = up(now=10.0)
    assert liveness.look(5.0).verdicts == ()
    assert liveness.silence("b", 5.0) == 0.0


def test_every_state_that_is_not_final_can_be_reached_and_left() -> None:
    reached = {step.state for step in TABLE.values()}
    left = {state for state, _ in TABLE} - {None}
    assert reached == set(PeerState)
    assert left == set(PeerState) - FORGOTTEN
    assert {sign for _, sign in TABLE} == set(Sign)


def test_an_agent_that_came_back_with_its_clock_set_back_is_welcome_once_the_later_start_is_silent() -> None:
    liveness = up(incarnation=7)
    assert not liveness.welcome("b", 6)
    assert liveness.link_up("b", 6, 1.0) == ()
    run(liveness, T + 1)
    assert liveness.welcome("b", 6)
    assert liveness.link_up("b", 6, T + 2) == (PeerUp("b", 6),)  # that the later one is dead is not proven
    assert not liveness.welcome("b", 5)
