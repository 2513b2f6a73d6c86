"""What the doctor looks at: all at the same time, and for a bounded time together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from allreduced.core.aside import MORE_THREADS, run_aside
from allreduced.core.errors import LimitExceeded
from allreduced.daemon.doctor.finding import Finding, problem

T_co = TypeVar("T_co", covariant=True)


class Check(Generic[T_co]):
    """One look at something that may hang, begun at once, in a thread that keeps nobody waiting.

    ``subject``: a word for what is looked at. ``look`` gathers the facts. ``mend``: what to do where it hangs.

    :raises LimitExceeded: there can be no further thread.
    """

    def __init__(self, subject: str, look: Callable[[], T_co], mend: str) -> None:
        self.subject = subject
        self._mend = mend
        try:
            self.done: Future[T_co] = run_aside(look, f"doctor: {subject}")
        except OSError as error:
            raise LimitExceeded(f"the doctor can start no thread to look at: {subject}", hint=MORE_THREADS) from error

    def facts(self) -> T_co | None:
        """Return the facts; None where the look has not ended yet. Does not wait.

        :raises Exception: what the look raised.
        """
        return self.done.result() if self.done.done() else None

    def findings(self, judge: Callable[[T_co], Iterable[Finding]], bound: float) -> list[Finding]:
        """Return what ``judge`` says of the facts, or that there are none yet, ``bound`` seconds after the beginning.

        :raises Exception: what the look raised.
        """
        facts = self.facts()
        if facts is not None:
            return list(judge(facts))
        message = f"this check did not finish within {bound:g} s"
        return [problem(self.subject, message, f"{self._mend}; allreduced doctor --timeout waits longer")]


def finish(checks: Iterable[Check[object]], bound: float) -> None:
    """Return when all have ended, and after ``bound`` seconds at the latest."""
    wait([check.done for check in checks], timeout=bound)
