"""How long a queue pair tries follows from the failure timeout, by the arithmetic of the InfiniBand architecture."""

from __future__ import annotations

import pytest

from allreduced.core.errors import ConfigError
from allreduced.transports.rdma.patience import Patience, exhausted_after, patience


def test_retries_are_exhausted_after_four_timeouts_each_at_the_latest() -> None:
    assert exhausted_after(14, 0) == pytest.approx(4 * 67.108864e-3)
    assert exhausted_after(14, 7) == pytest.approx(8 * 4 * 67.108864e-3)


@pytest.mark.parametrize(
    ("seconds", "timeout", "retry_count", "worst"),
    [
        (0.2, 12, 1, 0.134217728),  # the shortest failure timeout: fewer retries, not shorter ones
        (0.5, 12, 6, 0.469762048),
        (1.0, 12, 7, 0.536870912),
        (5.0, 15, 7, 4.294967296),
        (30.0, 17, 7, 17.179869184),
        (3600.0, 20, 7, 137.438953472),  # a lost packet must not stop a queue pair for minutes
    ],
)
def test_what_is_not_given_follows_from_the_failure_timeout(
    seconds: float, timeout: int, retry_count: int, worst: float
) -> None:
    chosen = patience(seconds)
    assert (chosen.timeout, chosen.retry_count) == (timeout, retry_count)
    assert chosen.ack_seconds == pytest.approx(worst)


@pytest.mark.parametrize("seconds", [0.2, 0.3, 0.7, 1.0, 2.5, 5.0, 10.0, 77.0, 600.0, 3600.0])
def test_nothing_takes_longer_than_the_failure_timeout(seconds: float) -> None:
    chosen = patience(seconds)
    assert chosen.ack_seconds <= seconds
    assert chosen.retry_count >= 1
    for retry_count in range(8):
        assert patience(seconds, retry_count=retry_count).ack_seconds <= seconds


def test_what_is_given_is_kept_and_the_rest_made_to_fit() -> None:
    assert patience(5.0, timeout=14) == Patience(14, 7)
    assert patience(5.0, timeout=17) == Patience(17, 1)  # 2 × 4 × 0.537 s
    assert patience(5.0, retry_count=1) == Patience(17, 1)
    assert patience(5.0, retry_count=0).timeout == 18
    assert patience(0.2, retry_count=7).timeout == 10


def test_what_cannot_fit_is_an_error_that_names_the_setting_and_the_arithmetic() -> None:
    with pytest.raises(
        ConfigError, match=r"timeout 19 \(2.15 s\).*retry_count 0.*8.59 s.*failure_timeout \(5 s\)"
    ) as e:
        patience(5.0, timeout=19)
    assert e.value.path == "rdma.timeout"
    with pytest.raises(ConfigError, match=r"8\.59 s") as e:
        patience(5.0, timeout=16, retry_count=7)
    assert e.value.path == "rdma.timeout"
    assert "lower rdma.timeout or rdma.retry_count" in e.value.hint
