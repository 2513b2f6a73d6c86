"""From nothing to a joined group: find this node's agent, or start one, then say hello and join."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from allreduced.client.arguments import check_deadline, check_number, check_text
from allreduced.client.conversation import Conversation
from allreduced.client.endpoint import ACCEPT_SECONDS, QueueFull, Receiver, reach, transmit
from allreduced.client.environment import AgentSettings, Launch, read_agent, read_job_secret, read_launch
from allreduced.client.private_agent import START_SECONDS, Lock, check_installed, private_agent, start
from allreduced.client.waiting import Procedure, Wait
from allreduced.core.addresses import SocketAddress, parse_socket
from allreduced.core.errors import AgentUnavailable, AllReducedError, ConfigError, InvalidArgument

logger = logging.getLogger("allreduced.client")

HELLO_SECONDS = 30.0
"""How long an agent may take to answer the hello; one that takes longer hangs."""

GRACE_SECONDS = 20.0
"""How much later than a deadline the agent's answer may come before the agent counts as hung. To operations, which end
by their deadline and the agent's ``failure_timeout``, that is added."""

_STARTS = 2
"""How often one connect() starts a private agent again after one that did not come up, or ended at once."""

_HANDSHAKES = 50
"""Private agents that may end in the face of one connect(): those of the last run of the same job do."""

_LATE_SECONDS = 1.0
"""How much later than the deadline of connect() a living agent's hello may come."""

_PAUSE, _LONGEST_PAUSE = 0.005, 0.2
"""Seconds between two looks for an agent that is not there yet; they grow."""

_SILENT_SECONDS = 1.0
"""How long an agent is waited for before that is logged."""

_agents_known: set[str] = set()
"""Where this process had the answer of an agent. One that is missing there is being restarted: it is waited for."""


@dataclass(frozen=True, slots=True)
class Options:
    """The checked arguments of ``connect``."""

    launch: Launch
    agent: AgentSettings
    group: str
    deadline: float
    default_deadline: float
    """0 for the agent's."""
    shared_memory: bool
    job_secret: bytes = field(default=b"", repr=False)
    """Empty where there is none."""


@dataclass(frozen=True, slots=True)
class Attached:
    """A connection whose conversation has joined its group."""

    connection: socket.socket
    conversation: Conversation
    receiver: Receiver
    options: Options
    """What leads to the same agent again."""


def read_options(
    *,
    job: str | None,
    group: str,
    rank: int | None,
    size: int | None,
    local_rank: int | None,
    local_size: int | None,
    socket: str | None,
    deadline: float,
    default_deadline: float | None,
    shared_memory: bool,
    agent: str | None,
    job_secret: str | bytes | None = None,
) -> Options:
    """Return the checked arguments, completed from the environment.

    :raises ConfigError: a variable or a number is out of range.
    :raises InvalidArgument: a name or a deadline is.
    """
    if socket is not None and not isinstance(socket, str):
        raise ConfigError(f"socket is {socket!r}; it must be a text: a path, or @name", path="socket")
    if not isinstance(shared_memory, bool):
        raise InvalidArgument(f"shared_memory is {shared_memory!r}; it is True or False")
    launch = read_launch(
        os.environ,
        job=None if job is None else check_text("job", job),
        rank=check_number("rank", rank),
        size=check_number("size", size),
        local_rank=check_number("local_rank", local_rank),
        local_size=check_number("local_size", local_size),
    )
    check_text("job", launch.job)
    check_text("group", group)
    return Options(
        launch=launch,
        agent=read_agent(os.environ, launch, socket=socket, agent=agent),
        group=group,
        deadline=check_deadline("deadline", deadline),
        default_deadline=0.0 if default_deadline is None else check_deadline("default_deadline", default_deadline),
        shared_memory=shared_memory,
        job_secret=read_job_secret(os.environ, job_secret),
    )


def attach(options: Options) -> Procedure[Attached]:
    """Find or start the agent, and join the group.

    An agent that answered this process before and does not now is waited for until the deadline: it is being restarted.

    :raises AgentUnavailable: there is no agent, and none could be started or starting is turned off.
    :raises DeadlineExceeded: ranks of the group did not come; ``missing`` names them.
    :raises AllReducedError: the agent refused this client.
    """
    until = time.monotonic() + options.deadline
    settings = options.agent
    if settings.socket is not None:
        return (yield from _attach_named(settings.socket, settings.source, options, until))
    tried: list[str] = []
    for place in settings.places:
        try:
            address = parse_socket(place)
            connection = yield from _try_once(address, place)
        except (AgentUnavailable, ConfigError) as error:
            logger.debug("event=agent_not_there place=%s reason=%s", place, error.message)
            tried.append(error.message)
            continue
        return (yield from _attach_named(address, place, options, until, connection))
    for place in settings.places:
        if place in _agents_known:
            return (yield from _attach_named(parse_socket(place), place, options, until))
    if settings.require:
        raise AgentUnavailable(
            f"no agent runs on this node, and starting one is turned off: {'; '.join(tried)}",
            hint="start one with: allreduced agent --config FILE; or unset ALLREDUCED_AGENT to have one started",
        )
    return (yield from _attach_private(options, until))


def again(options: Options, until: float) -> Options:
    """Return the options to attach anew with, within the time that is left."""
    return replace(options, deadline=max(until - time.monotonic(), 0.001))


def _attach_named(
    address: SocketAddress,
    source: str,
    options: Options,
    until: float,
    connection: socket.socket | None = None,
) -> Procedure[Attached]:
    """Join at the agent at ``address``, where ``connection`` may lead already. A known agent may be away for now."""
    options = replace(options, agent=replace(options.agent, socket=address, source=source))
    known = address.text in _agents_known
    begun = time.monotonic()
    say_at = begun + _SILENT_SECONDS
    pause = _PAUSE
    while True:
        try:
            if connection is None:
                connection = yield from reach(address, path=source, until=min(until, say_at, begun + ACCEPT_SECONDS))
            return (yield from _join(connection, options, until, ready=lambda: _agents_known.add(address.text)))
        except AgentUnavailable as error:
            connection = None
            in_queue = isinstance(error, QueueFull) and time.monotonic() < min(until, begun + ACCEPT_SECONDS)
            if not known and not in_queue:
                raise
            if time.monotonic() >= until:
                seconds = round(options.deadline, 2)
                raise AgentUnavailable(
                    f"the agent of this node did not come back within {seconds:g} s: {error.message}",
                    hint=error.hint,
                ) from error
            if time.monotonic() >= say_at:
                say_at = until
                seconds = until - time.monotonic()
                logger.warning("event=agent_waited_for seconds=%.0f reason=%r", seconds, error.message)
        yield Wait(-1, write=False, until=min(until, time.monotonic() + pause))
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def _attach_private(options: Options, until: float) -> Procedure[Attached]:
    options = replace(options, agent=replace(options.agent, places=()))
    private = private_agent(
        options.launch, options.agent, uid=os.geteuid(), host=socket.gethostname().split(".")[0] or "node"
    )
    lock = Lock(private.socket)
    starts = handshakes = 0
    pause = _PAUSE
    last: AllReducedError | None = None
    try:
        while last is None or (starts <= _STARTS and handshakes <= _HANDSHAKES and time.monotonic() < until):
            connection = yield from _try_reach(private.socket, until)
            if connection is not None:
                try:
                    return (yield from _join(connection, options, until, ready=lock.release))
                except AgentUnavailable as error:
                    # The agent of the job's last run accepts while it ends; so may one that was killed just now.
                    handshakes += 1
                    last = error
            elif lock.held or lock.acquire():
                check_installed()
                # Someone may have started it between the two steps; only the holder of the lock can tell.
                connection = yield from _try_reach(private.socket, until)
                if connection is not None:
                    connection.close()
                    continue
                starts += 1
                try:
                    yield from start(private.command(), until=min(until, time.monotonic() + START_SECONDS))
                    continue
                except AllReducedError as error:
                    last = error
                    if not isinstance(error, AgentUnavailable):
                        # Or did the one take the name meanwhile whose starter was killed while it came up?
                        connection = yield from _try_reach(private.socket, until)
                        if connection is None:
                            raise
                        connection.close()
            elif time.monotonic() >= until:
                last = AgentUnavailable(
                    f"the private agent at {private.socket} did not come up within {options.deadline:g} s",
                    hint="another rank of this job is starting it; see its stderr",
                )
                break
            logger.debug("event=private_agent_wait starts=%d handshakes=%d reason=%s", starts, handshakes, last)
            yield Wait(-1, write=False, until=min(until, time.monotonic() + pause))
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        raise last
    finally:
        lock.release()


def _try_once(address: SocketAddress, place: str) -> Procedure[socket.socket | None]:
    """Return a connection, or None where an agent is there and has no room for one yet."""
    try:
        return (yield from reach(address, path=place, until=0.0))
    except QueueFull:
        return None


def _try_reach(address: SocketAddress, until: float) -> Procedure[socket.socket | None]:
    try:
        return (yield from reach(address, path="socket", until=until))
    except QueueFull:
        raise  # an agent is there, and another one is no help
    except AgentUnavailable:
        return None


def _join(
    connection: socket.socket, options: Options, until: float, *, ready: Callable[[], None] | None = None
) -> Procedure[Attached]:
    """Say hello and join over ``connection``, which is closed if that fails. ``ready`` is called after Welcome."""
    conversation = Conversation(shared_memory=options.shared_memory)
    receiver = Receiver(connection, conversation)
    joined = False
    try:
        conversation.hello()
        hello_until = min(time.monotonic() + HELLO_SECONDS, until + _LATE_SECONDS)
        yield from _exchange(connection, receiver, conversation, lambda: conversation.welcome is not None, hello_until)
        if ready is not None:
            ready()
        launch = options.launch
        conversation.join(
            job=launch.job,
            group=options.group,
            rank=launch.rank,
            size=launch.size,
            local_rank=launch.local_rank,
            deadline=max(until - time.monotonic(), 0.001),
            default_deadline=options.default_deadline,
            job_secret=options.job_secret,
        )
        yield from _exchange(
            connection,
            receiver,
            conversation,
            lambda: conversation.joined is not None or conversation.join_error is not None,
            until + GRACE_SECONDS,
        )
        if conversation.join_error is not None:
            raise conversation.join_error
        joined = True
        return Attached(connection, conversation, receiver, options)
    finally:
        if not joined:
            conversation.fail(AgentUnavailable("the connection was given up"))
            connection.close()


def _exchange(
    connection: socket.socket,
    receiver: Receiver,
    conversation: Conversation,
    finished: Callable[[], bool],
    until: float,
) -> Procedure[None]:
    while True:
        transmit(connection, conversation)
        while not finished() and conversation.error is None and receiver.receive():
            pass
        if finished():
            return
        if conversation.error is not None:
            raise conversation.error
        if time.monotonic() >= until:
            raise AgentUnavailable(
                "the agent of this node does not answer", hint="it hangs or is stopped; see its log, and restart it"
            )
        yield Wait(connection.fileno(), write=conversation.has_output, until=until)
