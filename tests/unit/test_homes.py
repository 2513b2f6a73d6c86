"""At which addresses a refused connection proves that an agent is dead."""

from __future__ import annotations

import pytest

from allreduced.daemon import homes as module
from allreduced.daemon.homes import Homes

OWN, ELSEWHERE = "tcp://10.0.0.2:4123", "tcp://10.0.0.9:4123"
FROM_THERE = "tcp://10.0.0.2:50000"


def test_where_a_link_led_or_what_an_agent_tells_of_its_own_host_is_its_home() -> None:
    homes = Homes()
    assert homes.home_of(OWN) is None
    assert homes.told(OWN, "b", FROM_THERE)
    assert not homes.told(ELSEWHERE, "b", FROM_THERE)
    assert (homes.home_of(OWN), homes.home_of(ELSEWHERE)) == ("b", None)
    homes.led_to(ELSEWHERE, "b")
    assert homes.home_of(ELSEWHERE) == "b"
    homes.forget("b")
    assert (homes.home_of(OWN), homes.home_of(ELSEWHERE)) == (None, None)


def test_an_address_that_refuses_while_its_agent_lives_is_no_home_until_a_link_leads_there() -> None:
    homes = Homes()
    homes.told(OWN, "b", FROM_THERE)
    homes.refused_while_up(OWN, 5.0)
    assert homes.heard("b", 5.0) == ()  # it may have been sent before
    assert homes.heard("c", 9.0) == ()
    assert homes.home_of(OWN) == "b"
    assert homes.heard("b", 5.1) == (OWN,)
    assert homes.heard("b", 5.2) == ()
    assert homes.home_of(OWN) is None
    assert not homes.told(OWN, "b", FROM_THERE)
    assert homes.told(OWN, "c", FROM_THERE)  # another agent that has the address now
    homes.forget("c")
    homes.led_to(OWN, "b")
    assert homes.told(OWN, "b", FROM_THERE)


def test_another_start_of_an_agent_may_be_reached_where_the_last_one_could_not() -> None:
    homes = Homes()
    homes.told(OWN, "b", FROM_THERE)
    homes.refused_while_up(OWN, 5.0)
    homes.heard("b", 5.1)
    homes.forget("b")
    assert homes.home_of(OWN) is None
    assert homes.told(OWN, "b", FROM_THERE)
    assert homes.home_of(OWN) == "b"


def test_a_refusal_by_an_agent_that_is_not_heard_any_more_proves_its_death() -> None:
    homes = Homes()
    homes.led_to(OWN, "b")
    homes.refused_while_up(OWN, 5.0)
    assert homes.heard("b", 4.9) == ()
    assert homes.home_of(OWN) == "b"
    homes.forget("b")
    homes.led_to(OWN, "b")
    assert homes.heard("b", 9.0) == ()


def test_addresses_that_refuse_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PEERS", 2)
    homes = Homes()
    for port in (1, 2, 3):
        homes.led_to(f"tcp://10.0.0.2:{port}", "b")
        homes.refused_while_up(f"tcp://10.0.0.2:{port}", 1.0)
        homes.heard("b", 2.0)
    assert [homes.told(f"tcp://10.0.0.2:{port}", "b", FROM_THERE) for port in (1, 2, 3)] == [True, False, False]
