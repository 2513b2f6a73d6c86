"""The asyncio session: one connection whose socket the event loop watches. Everything runs on that loop."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
import sys
import time
import weakref

from allreduced.client.async_waiting import drive, wake
from allreduced.client.attach import GRACE_SECONDS, Attached, again, attach
from allreduced.client.attachment import CLOSE_SECONDS, Attachment
from allreduced.client.buffers import Block
from allreduced.client.endpoint import transmit
from allreduced.client.interrupts import interrupts
from allreduced.client.leaving import leave_when_forgotten
from allreduced.client.operation import Operation
from allreduced.core.errors import AgentUnavailable, AllReducedError, ClosedError

READS = 32
"""Reads in one turn of the loop at most, so that a large download leaves time for others."""


class AsyncSession(Attachment):
    """A rank of a group, for callers on the loop that is running now."""

    def __init__(self, attached: Attached) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiters: set[asyncio.Future[None]] = set()
        self._attaching: asyncio.Task[None] | None = None
        """Attaches again, by ``_attach_until``, and then starts the calls that are held up."""
        self._attach_until = 0.0
        self._attach_error: AllReducedError | None = None
        """Why the last attempt came to nothing."""
        self._held_up: list[tuple[Operation, float]] = []
        """Calls that wait for the agent, in their order, with the times when they must have ended."""
        super().__init__(attached)
        leave_when_forgotten(self)

    def _use(self, attached: Attached) -> None:
        super()._use(attached)
        self._writing = False
        # The loop and the conversation must not keep the session: a forgotten one ends by itself.
        reference = weakref.ref(self)
        self._conversation.owner = reference
        self._conversation.on_release = _Flusher(reference, self._loop)
        self._loop.add_reader(self._connection.fileno(), _on_readable, reference)

    def submit(self, operation: Operation) -> None:
        """Start the operation; what the socket does not take at once follows from the loop.

        The first call after the loss of the agent that was told to nobody yet raises AgentUnavailable. The next one
        attaches again, and with those after it waits for that, until its deadline at most.

        :raises AllReducedError: the session or its group has ended.
        """
        self._check()
        until = time.monotonic() + (operation.deadline or self._conversation.default_deadline)
        operation.give_up_at = until + self._conversation.failure_timeout + GRACE_SECONDS
        if self._conversation.told:
            self._held_up.append((operation, until))
            self._begin_to_attach(until)
            return
        with interrupts:
            self._conversation.submit(operation)
            self._send()

    async def wait(self, operation: Operation, timeout: float | None) -> bool:
        """Return True when the operation has ended, False when ``timeout`` seconds have passed before."""
        if operation.done:
            return True
        self._check_loop()
        until = operation.give_up_at
        if timeout is not None:
            until = min(until, time.monotonic() + timeout)
        while not operation.done:
            if not await self._change(until):
                if time.monotonic() >= operation.give_up_at:
                    self._give_up()
                break
        return operation.done

    async def allocate(self, nbytes: int) -> Block:
        """Return a block of an input arena.

        :raises LimitExceeded: the agent has no memory for it.
        """
        self._check()
        until = time.monotonic() + self._conversation.default_deadline
        if self._conversation.told:
            await self._attached(until)
        self._conversation.check()
        with interrupts:
            request = self._conversation.allocate(nbytes)
            self._send()
        while not request.done:
            if not await self._change(until + GRACE_SECONDS):
                self._give_up()
        return self._granted(request)

    def receive(self) -> None:
        """Take what has arrived."""
        with interrupts:
            self._receive()

    def _receive(self) -> None:
        conversation = self._conversation
        more = True
        reads = 0
        while more and reads < READS and conversation.error is None:
            more = self._receiver.receive()
            reads += 1
            completed, conversation.completed = conversation.completed, []
            for part, outcome in completed:
                error = part.operation.materialize(part, outcome)
                part.operation.part_done(part, outcome, error)
        self._notify()
        if conversation.error is not None:
            self._shut()
        else:
            self._send()

    async def close(self) -> None:
        """Leave the group; what is pending ends with ClosedError. Never waits long. Views stay valid."""
        if self._left or self._forked():
            return
        if not _runs_here(self._loop):
            if self._loop.is_running():
                self._check_loop()
            self.leave_at_exit()  # nobody watches the connection any more
            return
        attaching = self._attaching
        self._leave()
        if attaching is not None:
            await asyncio.wait([attaching])
        until = time.monotonic() + CLOSE_SECONDS
        while self._conversation.has_output and not self._closed and await self._change(until):
            pass

    def leave_at_exit(self) -> None:
        """Say goodbye without waiting, where the process or the communicator ends without having been closed."""
        if self._forked():
            return
        self._left = True
        self._stop_attaching(ClosedError("the communicator was closed"))
        if self._closed:
            return
        self._conversation.leave()
        transmit(self._connection, self._conversation)
        self._shut()

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptor, and leave the parent's loop alone."""
        self._closed = True
        self._connection.close()

    def flush(self) -> None:
        """Send returned leases."""
        with interrupts:
            self._send()

    def __del__(self) -> None:
        if hasattr(self, "joined") and not sys.is_finalizing():
            self.leave_at_exit()

    async def _change(self, until: float) -> bool:
        """Wait until anything has arrived or been sent; return False if the time came first."""
        changed: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(changed)
        try:
            done, _ = await asyncio.wait([changed], timeout=max(until - time.monotonic(), 0.0))
            return bool(done)
        finally:
            self._waiters.discard(changed)

    def _notify(self) -> None:
        for waiter in self._waiters:
            wake(waiter)

    def _send(self) -> None:
        if self._closed:
            return
        transmit(self._connection, self._conversation)
        unsent = self._conversation.has_output
        if unsent != self._writing:
            self._writing = unsent
            if unsent:
                self._loop.add_writer(self._connection.fileno(), _on_writable, weakref.ref(self))
            else:
                self._loop.remove_writer(self._connection.fileno())
                self._notify()
        if self._left and not self._conversation.leased and not unsent:
            self._shut()

    # After the loss of the agent

    def _begin_to_attach(self, until: float) -> None:
        """Have the rank taken anew by ``until``, in a new group at the agent that follows the lost one."""
        if self._attaching is not None:
            if until >= self._attach_until:
                return
            self._attaching.cancel()  # begun anew, so that no call ends after its deadline
        self._attach_until = until
        self._attaching = self._loop.create_task(self._attach_again(until))

    async def _attach_again(self, until: float) -> None:
        try:
            attached = await drive(attach(again(self._options, until)))
        except AllReducedError as error:
            self._stop_attaching(error)
            return
        except BaseException as error:  # cancelled by somebody, or a defect: nobody must wait for it
            if self._attaching is asyncio.current_task():
                self._stop_attaching(AgentUnavailable(f"attaching again to the agent of this node ended: {error!r}"))
            raise
        with interrupts:
            self._attaching = None
            self._use(attached)
            held_up, self._held_up = self._held_up, []
            for operation, end in held_up:
                operation.deadline = max(end - time.monotonic(), 0.001)
                self._conversation.submit(operation)
            self._send()
            self._notify()

    def _stop_attaching(self, error: AllReducedError) -> None:
        """End what waits for the agent with ``error``."""
        attaching, self._attaching = self._attaching, None
        if attaching is None:
            return
        if not attaching.done() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(attaching.cancel)
        self._attach_error = error
        held_up, self._held_up = self._held_up, []
        for operation, _ in held_up:
            operation.part_failed(None, error)
        self._notify()

    async def _attached(self, until: float) -> None:
        """Wait until the rank is taken anew.

        :raises AllReducedError: it could not be.
        """
        self._begin_to_attach(until)
        while self._attaching is not None:
            await self._change(until + GRACE_SECONDS)
        if self._conversation.told:
            raise copy.copy(self._attach_error or AgentUnavailable("the agent of this node was lost again"))

    def _leave(self) -> None:
        self._left = True
        self._stop_attaching(ClosedError("the communicator was closed"))
        self._conversation.leave()
        self._notify()
        self._send()

    def _give_up(self) -> None:
        self._conversation.fail(self._hung())
        self._notify()
        self._shut()

    def _shut(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._loop.is_running() and not _runs_here(self._loop):
            # The garbage collector runs us in another thread.
            self._loop.call_soon_threadsafe(_detach, self._loop, self._connection)
        else:
            _detach(self._loop, self._connection)

    def _check(self) -> None:
        self._check_process()
        self._check_open()
        self._check_loop()

    def _check_loop(self) -> None:
        """Return if the loop that watches the connection can take note of what is called here.

        Between two runs of that loop calls may be started, though nothing runs then.
        """
        if _runs_here(self._loop):
            return
        if self._loop.is_closed():
            problem = "the event loop of this communicator is closed"
        elif self._loop.is_running() or _any_runs_here():
            problem = "this communicator belongs to another event loop"
        else:
            return
        raise ClosedError(problem, hint="call AsyncCommunicator.connect() in the loop that uses it")


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _any_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _detach(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    if not loop.is_closed():
        loop.remove_reader(connection.fileno())
        loop.remove_writer(connection.fileno())
    connection.close()


def _on_readable(reference: weakref.ref[AsyncSession]) -> None:
    session = reference()
    if session is not None:
        session.receive()


def _on_writable(reference: weakref.ref[AsyncSession]) -> None:
    session = reference()
    if session is not None:
        session.flush()


class _Flusher:
    """Asks the loop to flush the session, from ``__del__`` in any thread; once for many leases."""

    def __init__(self, reference: weakref.ref[AsyncSession], loop: asyncio.AbstractEventLoop) -> None:
        self._reference = reference
        self._loop = loop
        self._asked = False

    def __call__(self) -> None:
        if self._asked or self._loop.is_closed():
            return
        self._asked = True
        with contextlib.suppress(RuntimeError):  # the loop closed meanwhile, and its connection with it
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._asked = False
        session = self._reference()
        if session is not None:
            session.flush()
