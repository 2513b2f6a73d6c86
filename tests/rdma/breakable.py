"""An agent that puts all of its queue pairs into the error state when it gets SIGUSR1, as a failing device does."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, ClassVar
from unittest.mock import patch
from weakref import WeakSet

from allreduced.cli.main import main
from allreduced.transports.rdma.verbs.binding import Modules
from allreduced.transports.rdma.verbs.pair import Pair


class BreakablePair(Pair):
    """A queue pair of this process that can be broken."""

    made: ClassVar[WeakSet[BreakablePair]] = WeakSet()

    def __init__(self, modules: Modules, handle: Any, max_inline: int) -> None:
        super().__init__(modules, handle, max_inline)
        BreakablePair.made.add(self)

    @classmethod
    def living(cls) -> list[BreakablePair]:
        """Return those that are open."""
        return [pair for pair in cls.made if not pair._closed]

    def fail(self) -> None:
        """Put it into the error state."""
        enums = self._modules.enums
        attributes = self._modules.qp.QPAttr(qp_state=enums.IBV_QPS_ERR)
        self._handle.modify(attributes, int(enums.IBV_QP_STATE))


def fail_all(*_: object) -> None:
    """Break all queue pairs of this process."""
    for pair in BreakablePair.living():
        pair.fail()


def breakable() -> Any:
    """Return a context in which all queue pairs that are made can be broken."""
    return patch("allreduced.transports.rdma.verbs.device.Pair", BreakablePair)


def agent(words: list[str]) -> int:
    """Be ``allreduced`` with these words. Run by the nursery."""
    handler: Callable[..., None] = fail_all
    signal.signal(signal.SIGUSR1, handler)
    with breakable():
        return main(words)
