"""The blocking session: one connection, used by any number of threads of one process, without a thread of its own.

Progress happens in the calls of the user. Among the threads that wait, one reads from the socket and wakes the others;
each thread that has something to send sends it itself. Whoever has the lock is not interrupted by Ctrl-C; whoever waits
without it is.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from allreduced.client.attach import GRACE_SECONDS, Attached, again, attach
from allreduced.client.attachment import CLOSE_SECONDS, Attachment
from allreduced.client.buffers import Block
from allreduced.client.conversation import Conversation
from allreduced.client.endpoint import transmit
from allreduced.client.interrupts import interrupts
from allreduced.client.leaving import forget, leave_when_forgotten
from allreduced.client.operation import Operation
from allreduced.client.waiting import SLICE_SECONDS, drive, poll
from allreduced.core.errors import AgentUnavailable

AT_ONCE = 64 << 10
"""Bytes of a result that is copied without letting other threads in."""


class Session(Attachment):
    """A rank of a group, for blocking callers."""

    def __init__(self, attached: Attached) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._reading = False
        self._pollers = 0
        self._sleepers = 0
        """Threads that wait for ``_changed``."""
        self._attaching = False
        """A thread attaches again, without the lock."""
        self._retired: list[socket.socket] = []
        """Connections to agents that were lost, to be closed when no thread waits for them any more."""
        super().__init__(attached)
        leave_when_forgotten(self)

    def _use(self, attached: Attached) -> None:
        super()._use(attached)
        self._input = select.poll()  # for the thread that reads
        self._input.register(self._connection, select.POLLIN)
        self._conversation.on_release = _flusher(self)
        self._conversation.owner = weakref.ref(self)

    def submit(self, operation: Operation) -> None:
        """Start the operation: when this returns, the agent has it, and its input if that was copied.

        The first call after the loss of the agent that was told to nobody yet raises AgentUnavailable. The next one
        attaches again, and waits for that until its deadline at most.

        :raises AllReducedError: the session or its group has ended.
        """
        self._check_process()
        with interrupts, self._lock:
            conversation = self._begin(operation)
            if not (conversation.waiting or conversation.has_output):
                return
            if self._run(_Drained(conversation), operation.give_up_at):
                return
            self._give_up()
        operation.outcome()

    def call(self, operation: Operation) -> object:
        """Start the operation, wait for its end, and return its result.

        :raises AllReducedError: how it failed; the session or its group has ended.
        """
        self._check_process()
        with interrupts, self._lock:
            self._begin(operation)
            if not self._run(operation, operation.give_up_at):
                self._give_up()
            if operation.error is not None:
                self._conversation.tell(operation.error)
        return operation.outcome()

    def wait(self, operation: Operation, timeout: float | None) -> bool:
        """Return True when the operation has ended, False when ``timeout`` seconds have passed before."""
        if operation.done:
            return True
        self._check_process()
        until = operation.give_up_at
        if timeout is not None:
            until = min(until, time.monotonic() + timeout)
        with interrupts, self._lock:
            if self._run(operation, until):
                return True
            if time.monotonic() >= operation.give_up_at:
                self._give_up()
            return operation.done

    def allocate(self, nbytes: int) -> Block:
        """Return a block of an input arena.

        :raises LimitExceeded: the agent has no memory for it.
        """
        self._check_process()
        with interrupts, self._lock:
            self._check_open()
            until = time.monotonic() + self._conversation.default_deadline
            if self._conversation.told:
                self._attach_again(until)
            self._conversation.check()
            request = self._conversation.allocate(nbytes)
            if not self._run(request, until + GRACE_SECONDS):
                self._give_up()
            return self._granted(request)

    def close(self) -> None:
        """Leave the group; what is pending ends with ClosedError. Never waits long.

        Views stay valid: the connection itself ends when the last of them is gone.
        """
        if self._left or self._forked():
            return
        with interrupts, self._lock:
            self._left = True
            conversation = self._conversation
            conversation.leave()
            until = time.monotonic() + CLOSE_SECONDS
            self._send()
            while conversation.has_output and time.monotonic() < until:
                self._poll(read=False, write=True, until=until)
                self._send()
            self._wake_others()

    def leave_at_exit(self) -> None:
        """Say goodbye without waiting, where the process ends without having closed the communicator."""
        if self._forked():
            return
        with interrupts:
            if not self._lock.acquire(blocking=False):
                return
            try:
                self._left = True
                self._conversation.leave()
                self._send()
                self._shut()
            finally:
                self._lock.release()

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptor, so that the parent's end shows at the agent at once."""
        for connection in (self._connection, *self._retired):
            connection.close()

    def __del__(self) -> None:
        # A communicator that was dropped, with all its views and works: leave as close() would, but never wait.
        if hasattr(self, "joined") and not sys.is_finalizing():
            self.leave_at_exit()

    # All below: with the lock held.

    def _begin(self, operation: Operation) -> Conversation:
        if self._left:
            self._check_open()
        until = time.monotonic() + (operation.deadline or self._conversation.default_deadline)
        if self._conversation.told:
            self._attach_again(until)
            operation.deadline = max(until - time.monotonic(), 0.001)
        conversation = self._conversation
        operation.give_up_at = until + conversation.failure_timeout + GRACE_SECONDS
        conversation.submit(operation)
        self._send()
        return conversation

    def _run(self, wanted: _Wanted, until: float) -> bool:
        """Send and receive until ``wanted`` is done, but not past ``until``; return whether it is.

        Returns at once when the conversation ends: everything that can be waited for has ended with it.
        """
        conversation = self._conversation
        while True:
            if conversation.has_output:
                self._send()
            if wanted.done or (conversation.error is not None and not conversation.completed):
                return True
            rest = until - time.monotonic()
            if self._reading:
                if rest <= 0:
                    return False
                if conversation.has_output and conversation.error is None:
                    self._poll(read=False, write=True, until=until)
                else:
                    self._sleep(until)
                continue
            self._reading = True
            try:
                if rest > 0 and not conversation.completed:
                    if rest < SLICE_SECONDS or conversation.has_output or self._closed:
                        self._poll(read=True, write=conversation.has_output, until=until)
                    else:
                        self._wait_for_input()
                self._receive()
            finally:
                self._reading = False
                self._wake_others()
            if rest <= 0:
                ended: bool = wanted.done  # anew
                return ended or conversation.error is not None

    def _wait_for_input(self) -> None:
        """Wait as :meth:`_poll` does for something to read.

        A receive that blocks would do as well but for one thing: it wakes up each time the agent reads.
        """
        self._pollers += 1
        try:
            self._lock.release()
            with interrupts.allowed:
                self._input.poll(SLICE_SECONDS * 1000)
        finally:
            self._lock.acquire()
            self._pollers -= 1
            if self._closed or self._retired:
                self._release_descriptor()

    def _receive(self) -> None:
        """Take what has arrived."""
        conversation = self._conversation
        arrived = True
        while arrived:
            arrived = conversation.error is None and self._receiver.receive()
            self._finish_completed()

    def _finish_completed(self) -> None:
        """Bring results to where they go. Large ones without the lock, so that others can submit meanwhile."""
        conversation = self._conversation
        while conversation.completed:
            # It stays in the list until it is done: an interrupted copy is made again by the next reader.
            part, outcome = conversation.completed[0]
            if part.signature.nbytes <= AT_ONCE:
                error = part.operation.materialize(part, outcome)
            else:
                try:
                    self._lock.release()
                    error = part.operation.materialize(part, outcome)
                finally:
                    self._lock.acquire()
            del conversation.completed[0]
            part.operation.part_done(part, outcome, error)
        self._wake_others()

    def _wake_others(self) -> None:
        if self._sleepers:
            self._changed.notify_all()

    def _poll(self, *, read: bool, write: bool, until: float) -> None:
        """Wait without the lock, a slice long at most. The descriptor is not closed while anyone waits for it."""
        if self._closed:
            return
        self._pollers += 1
        try:
            # Inside the block: a signal's handler may raise right after it.
            self._lock.release()
            until = min(until, time.monotonic() + SLICE_SECONDS)
            with interrupts.allowed:
                poll(self._connection.fileno(), read=read, write=write, until=until)
        finally:
            self._lock.acquire()
            self._pollers -= 1
            self._release_descriptor()

    def _send(self) -> None:
        if not self._closed:
            transmit(self._connection, self._conversation)
            conversation = self._conversation
            if self._left and (conversation.broken or not (conversation.leased or conversation.has_output)):
                self._shut()

    def _attach_again(self, until: float) -> None:
        """Take the rank anew, in a new group at the agent that follows the lost one. Waits without the lock.

        :raises AgentUnavailable: the agent is not back by ``until``.
        :raises AllReducedError: the group did not form anew by then, or this session was closed meanwhile.
        """
        while self._conversation.told:
            self._check_open()
            if self._attaching:
                if time.monotonic() >= until:
                    raise AgentUnavailable("the agent of this node is not back yet; another thread waits for it too")
                self._sleep(until)
                continue
            self._attaching = True
            with contextlib.suppress(OSError):
                # An agent that only hung, and goes on, must see that the rank is free; threads that wait must wake up.
                self._connection.shutdown(socket.SHUT_RDWR)
            try:
                self._lock.release()
                with interrupts.allowed:
                    attached = drive(attach(again(self._options, until)), self._check_open)
            finally:
                self._lock.acquire()
                self._attaching = False
                self._wake_others()
            self._retired.append(self._connection)
            self._use(attached)
            if self._left:
                self._conversation.leave()
                self._send()
            self._release_descriptor()
        self._check_open()

    def _sleep(self, until: float) -> None:
        self._sleepers += 1
        try:
            # In slices: Ctrl-C, which must not come inside of this wait, comes between two of them.
            self._changed.wait(min(until - time.monotonic(), SLICE_SECONDS))
        finally:
            self._sleepers -= 1
        try:
            self._lock.release()  # the handler may use this session, or be what closes it
            with interrupts.allowed:
                pass
        finally:
            self._lock.acquire()

    def _give_up(self) -> None:
        self._conversation.fail(self._hung())
        self._wake_others()

    def _shut(self) -> None:
        if self._closed:
            return
        self._closed = True
        forget(self)
        self._release_descriptor()

    def _release_descriptor(self) -> None:
        if self._pollers:
            return
        while self._retired:
            self._retired.pop().close()
        if self._closed:
            self._connection.close()

    # Without the lock

    def flush(self) -> None:
        """Send returned leases now, if nobody else holds the lock; else its holder's next call does.

        Called from ``__del__`` of views: never waits, and never touches the lock twice.
        """
        if self._forked():
            return
        with interrupts:
            if not self._lock.acquire(blocking=False):
                return
            try:
                self._send()
            finally:
                self._lock.release()


class _Wanted(Protocol):
    """What is waited for."""

    @property
    def done(self) -> bool: ...


class _Drained:
    """Everything was sent."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    @property
    def done(self) -> bool:
        return not (self._conversation.waiting or self._conversation.has_output)


def _flusher(session: Session) -> Callable[[], None]:
    """Return a function that flushes the session as long as it exists: views must not keep it alive."""
    reference = weakref.ref(session)

    def flush() -> None:
        alive = reference()
        if alive is not None:
            alive.flush()

    return flush
