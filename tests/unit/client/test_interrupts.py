"""Ctrl-C at every step of a call: the call may be lost, but never what the next one needs."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import numpy as np
import pytest

import allreduced.client.session
from allreduced.client import Communicator, Work
from allreduced.client import interrupts as module
from allreduced.client.interrupts import interrupts
from allreduced.core.errors import ClosedError
from allreduced.protocol.local import Submit

if TYPE_CHECKING:
    from _typeshed import TraceFunction
    from tests.unit.client.conftest import FakeAgent

LARGE = 100_000
"""Elements that do not fit inside a message."""

_CLIENT = str(Path(allreduced.client.session.__file__).parent)


class Interrupter:
    """Sends SIGINT to this process at one step of the client's code, counted from the begin of the block.

    ``struck`` tells whether that step was reached.
    """

    def __init__(self, step: int) -> None:
        self._left = step
        self.struck = False
        self._before = sys.gettrace()

    def __enter__(self) -> Interrupter:
        sys.settrace(self._enter_frame)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        if not frame.f_code.co_filename.startswith(_CLIENT) or _in_destructor(frame):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> TraceFunction:
        if event == "opcode" and not self.struck:
            self._left -= 1
            if self._left == 0:
                self.struck = True
                signal.raise_signal(signal.SIGINT)
        return self._step


def _in_destructor(frame: FrameType | None) -> bool:
    """Return whether Python reports what is raised here to nobody."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


@pytest.fixture(autouse=True)
def usual_handler() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, whatever the shell that started the tests wants."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def _small(comm: Communicator) -> None:
    comm.all_reduce(np.ones(3))


def _large_view(comm: Communicator) -> None:
    comm.all_reduce(np.ones(LARGE), view=True)


def _work(comm: Communicator) -> None:
    comm.all_reduce(np.ones(LARGE), async_op=True).wait()


def _memory(comm: Communicator) -> None:
    comm.empty(LARGE, np.float64)


@pytest.mark.parametrize("call", [_small, _large_view, _work, _memory])
def test_a_call_that_is_interrupted_anywhere_leaves_the_next_one_whole(
    agent: FakeAgent, comm: Communicator, call: Callable[[Communicator], None]
) -> None:
    comm.all_reduce(np.ones(LARGE))  # what the first call does is behind us
    interrupted = 0
    for step in itertools.count(1, 7):
        with Interrupter(step) as interrupter:
            try:
                call(comm)
            except KeyboardInterrupt:
                interrupted += 1
        if not interrupter.struck:
            break
        assert comm.all_reduce(np.full(2, 3.0)).tolist() == [3.0, 3.0]
    assert interrupted > 10
    requests = [message.request for message in agent.seen if isinstance(message, Submit)]
    assert len(requests) == len(set(requests))


def test_an_interrupt_ends_a_wait_at_once(agent: FakeAgent, comm: Communicator) -> None:
    agent.hold = True
    work = comm.all_reduce(np.ones(3), name="x", async_op=True)

    def wait() -> None:
        agent.order(lambda: os.kill(os.getpid(), signal.SIGINT))
        work.wait()

    with pytest.raises(KeyboardInterrupt):
        wait()
    agent.complete("x")
    assert work.wait().tolist() == [1.0, 1.0, 1.0]


def test_an_interrupt_ends_the_wait_for_the_thread_that_reads(
    agent: FakeAgent, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allreduced.client.session.SLICE_SECONDS", 0.01)
    agent.hold = True
    works = [comm.all_reduce(np.ones(3), name=name, async_op=True) for name in "xy"]
    thread = threading.Thread(target=works[1].wait)
    thread.start()

    def wait() -> None:
        agent.order(lambda: os.kill(os.getpid(), signal.SIGINT))
        works[0].wait()

    with pytest.raises(KeyboardInterrupt):
        wait()
    agent.complete("y")
    thread.join(20)
    assert not thread.is_alive()
    agent.complete("x")
    assert works[0].wait().tolist() == [1.0, 1.0, 1.0]


def test_a_handler_may_use_the_communicator_whose_other_thread_reads(
    agent: FakeAgent, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allreduced.client.session.SLICE_SECONDS", 0.01)
    agent.hold = True
    works = [comm.all_reduce(np.ones(3), name=name, async_op=True) for name in "xy"]
    ended: list[type[BaseException]] = []

    def wait(work: Work[np.ndarray]) -> None:
        try:
            work.wait()
        except ClosedError as error:
            ended.append(type(error))

    thread = threading.Thread(target=wait, args=(works[1],))
    thread.start()
    before = signal.signal(signal.SIGINT, lambda number, frame: comm.close())
    try:
        agent.order(lambda: os.kill(os.getpid(), signal.SIGINT))
        wait(works[0])
        thread.join(20)
        assert not thread.is_alive()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [ClosedError, ClosedError]


@pytest.mark.parametrize("exits", [False, True])
def test_a_handler_that_raises_at_the_edge_of_a_call_does_not_put_ctrl_c_off_for_good(exits: bool) -> None:
    """As one of SIGALRM may do: before a call is counted, and before it is not counted any more."""
    interrupts.__enter__()
    if exits:
        interrupts._depth = 1  # it was entered, and its exit was cut off
    else:
        interrupts._depth = 0
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with interrupts:
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def test_a_call_after_one_whose_begin_was_cut_off_gives_the_handler_back() -> None:
    interrupts.__enter__()
    interrupts._depth = 0
    with interrupts:
        pass


@pytest.fixture
def at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is called here count as a call of the client."""
    monkeypatch.setattr(module, "_CLIENT", str(Path(__file__).parent))


@pytest.mark.usefixtures("at_work")
def test_the_handler_of_the_user_runs_when_the_call_is_at_its_end() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with interrupts:
            with interrupts:
                signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    def newer(number: int, frame: FrameType | None) -> None:
        pass

    try:
        with interrupts:
            signal.signal(signal.SIGINT, newer)
        assert signal.getsignal(signal.SIGINT) is newer
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_python_does_not_handle_is_left_alone(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts:
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_another_thread_forks_can_be_interrupted() -> None:
    status: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)
        status.append(os.waitpid(pid, 0)[1])

    with interrupts:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert status == [0]
