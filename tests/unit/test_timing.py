"""All times of failure handling follow from one knob."""

from __future__ import annotations

import dataclasses
import math

import pytest

from allreduced.core.errors import ConfigError
from allreduced.daemon.timing import LONGEST, SHORTEST, Timing, derived


def test_the_default_gives_these_times() -> None:
    assert derived(5.0) == Timing(
        failure_timeout=5.0,
        heartbeat=0.625,
        tolerance=0.3125,
        connect=2.5,
        first_pause=0.05,
        longest_pause=0.5,
        stagger=0.625,
        give_up=7.5,
        confirm=0.02,
    )


@pytest.mark.parametrize("timeout", [SHORTEST, 0.5, 5.0, LONGEST])
def test_every_failure_timeout_that_is_allowed_is_free_of_contradictions(timeout: float) -> None:
    assert derived(timeout, deadline=timeout).failure_timeout == timeout


@pytest.mark.parametrize("timeout", [0.0, -1.0, math.nan, math.inf, SHORTEST / 2, 2 * LONGEST])
def test_other_failure_timeouts_are_refused(timeout: float) -> None:
    with pytest.raises(ConfigError, match="failure_timeout"):
        derived(timeout)


def test_a_deadline_shorter_than_the_failure_timeout_is_a_contradiction() -> None:
    with pytest.raises(
        ConfigError, match=r"failure\.deadline \(3 s\) is shorter than failure\.failure_timeout \(5 s\)"
    ):
        derived(5.0, deadline=3.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("heartbeat", 2.0),
        ("tolerance", 1.0),
        ("connect", 3.0),
        ("first_pause", 0.6),
        ("longest_pause", 2.0),
        ("stagger", 2.0),
        ("give_up", 5.0),
        ("confirm", 1.0),
        ("confirm", 0.0),
        ("heartbeat", math.nan),
    ],
)
def test_times_that_contradict_each_other_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        dataclasses.replace(derived(5.0), **{name: value})


def test_the_description_names_every_time_with_its_meaning() -> None:
    lines = derived(5.0).describe()
    assert [line.partition(" = ")[0] for line in lines] == [field.name for field in dataclasses.fields(Timing)]
    assert lines[0] == "failure_timeout = 5 s: silence after which a peer is dead"
