"""How long a queue pair tries before it gives up: codes of the InfiniBand architecture, from a number of seconds. Pure.

A request that is not acknowledged is sent again after the local ACK timeout, ``4.096 µs × 2^timeout``. The architecture
(volume 1, 9.7.6.1.3) lets an adapter take up to four times as long to notice, so the pair fails, at the latest, after
``4 × (retry_count + 1) × 4.096 µs × 2^timeout``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from allreduced.core.errors import ConfigError

ACK_UNIT: Final = 4.096e-6
"""Seconds of the local ACK timeout with code 0 as an exponent. Code 0 itself means: wait for ever."""

SLOWEST: Final = 4
"""How many times the local ACK timeout an adapter may take to notice."""

MOST_RETRIES: Final = 7
"""The field of a queue pair has 3 bits."""

SHORTEST_TIMEOUT: Final = 12
"""Code (16.8 ms) below which fewer retries are better: adapters and switches delay that long at times."""

LONGEST_TIMEOUT: Final = 20
"""Code (4.3 s) up to which timeouts are chosen: so long a queue pair stands still when the last packet is lost."""


@dataclass(frozen=True, slots=True)
class Patience:
    """The codes that a queue pair is set to."""

    timeout: int
    """Local ACK timeout, 1 to 31."""
    retry_count: int
    """Tries after the first one, where no acknowledgement comes; 0 to 7."""

    @property
    def ack_seconds(self) -> float:
        """Seconds without any acknowledgement after which the pair has failed, at the latest."""
        return exhausted_after(self.timeout, self.retry_count)

    def describe(self) -> tuple[str, ...]:
        """Return a line for each code: name, number, meaning."""
        return (
            f"rdma.timeout = {self.timeout}: {ACK_UNIT * (1 << self.timeout):.3g} s for an acknowledgement",
            f"rdma.retry_count = {self.retry_count}: without any, failed after {self.ack_seconds:.3g} s",
        )


def exhausted_after(timeout: int, retry_count: int) -> float:
    """Return the seconds after which retries are exhausted at the latest. ``timeout``: a code, 1 to 31."""
    return SLOWEST * (retry_count + 1) * ACK_UNIT * (1 << timeout)


def patience(seconds: float, *, timeout: int | None = None, retry_count: int | None = None) -> Patience:
    """Return codes with which a queue pair that nobody answers has failed within ``seconds``, for sure.

    What is given is kept, and the rest chosen to fit: as many retries as possible, each after at least 16.8 ms
    (:data:`SHORTEST_TIMEOUT`), and with these the longest timeout, up to 4.3 s (:data:`LONGEST_TIMEOUT`).

    :raises ConfigError: what is given does not fit into ``seconds``; ``path`` names the setting.
    """
    retries = _retries(seconds, timeout) if retry_count is None else retry_count
    chosen = timeout if timeout is not None else _longest(seconds, retries)
    worst = exhausted_after(chosen, retries)
    if worst > seconds:
        given = "timeout" if timeout is not None else "retry_count"
        raise ConfigError(
            f"with rdma.timeout {chosen} ({ACK_UNIT * (1 << chosen):.3g} s) and rdma.retry_count {retries} a queue pair"
            f" fails after {worst:.3g} s at the latest, which is longer than failure.failure_timeout ({seconds:g} s)",
            path=f"rdma.{given}",
            hint="lower rdma.timeout or rdma.retry_count, or leave them out: they follow from failure_timeout",
        )
    return Patience(chosen, retries)


def _retries(seconds: float, timeout: int | None) -> int:
    """Return the most retries that fit with the timeout, or with the shortest one that is sensible."""
    least = SHORTEST_TIMEOUT if timeout is None else timeout
    fitting = [count for count in range(MOST_RETRIES + 1) if exhausted_after(least, count) <= seconds]
    return max(fitting, default=0)


def _longest(seconds: float, retry_count: int) -> int:
    fitting = [code for code in range(1, LONGEST_TIMEOUT + 1) if exhausted_after(code, retry_count) <= seconds]
    return max(fitting, default=1)
