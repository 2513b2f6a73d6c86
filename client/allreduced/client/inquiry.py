"""Asking an agent what runs."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from allreduced.client.endpoint import RECEIVE, reach
from allreduced.client.waiting import drive, poll
from allreduced.core.addresses import SocketAddress
from allreduced.core.errors import AgentUnavailable, ProtocolError, from_wire
from allreduced.protocol.framing import MessageReader
from allreduced.protocol.local import (
    HIGHEST_VERSION,
    LOWEST_VERSION,
    MAX_MESSAGE,
    STATUS_VERSION,
    AgentStatus,
    AskStatus,
    Hello,
    Refused,
    RequestFailed,
    StatusEnd,
    ToAgent,
    ToClient,
    Welcome,
    decode_to_client,
    encode,
)
from allreduced.protocol.status import AgentReport, UnansweredReport

_REQUEST = 1


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """What was told. ``reports``: first that of the agent that was asked. ``unanswered``: other agents, and why."""

    reports: tuple[AgentReport, ...]
    unanswered: tuple[UnansweredReport, ...]


def ask_status(address: SocketAddress, *, path: str, others: bool, timeout: float, probe: int = 0) -> ClusterStatus:
    """Ask the agent at ``address`` what runs, and (``others``) through it all agents that it knows.

    ``probe``: as in AskStatus. ``path`` says where the address comes from. Waits ``timeout`` seconds at most. No
    operation is disturbed by it.

    :raises AgentUnavailable: nobody answers there, or not in time.
    :raises ConfigError: what is there is no socket.
    :raises AuthenticationError: the agent does not tell this user.
    :raises ProtocolError: the agent is of a version that has no status, or what is there is no agent.
    """
    until = time.monotonic() + timeout
    with drive(reach(address, path=path, until=until, trusting=True)) as connection:
        messages = _messages(connection, address, until)
        # Without shared memory: no descriptors are expected.
        _send(connection, Hello(LOWEST_VERSION, HIGHEST_VERSION, os.getpid(), False))
        welcome = _next(messages)
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"the agent at {address} sent {type(welcome).__name__} instead of Welcome")
        if welcome.version < STATUS_VERSION:
            raise ProtocolError(
                f"the agent at {address} speaks version {welcome.version} of the protocol, which has no status",
                hint="it runs an older release: install this one there, and start the agent anew",
            )
        _send(connection, AskStatus(_REQUEST, others, probe))
        reports: list[AgentReport] = []
        while True:
            message = _next(messages)
            if isinstance(message, AgentStatus):
                reports.append(message.report)
            elif isinstance(message, StatusEnd):
                return ClusterStatus(tuple(reports), message.unanswered)
            elif isinstance(message, RequestFailed):
                raise from_wire(message.error)
            else:
                raise ProtocolError(f"the agent at {address} sent {type(message).__name__} instead of its status")


def _next(messages: Iterator[ToClient]) -> ToClient:
    message = next(messages)
    if isinstance(message, Refused):
        raise from_wire(message.error)
    return message


def _send(connection: socket.socket, message: ToAgent) -> None:
    try:
        connection.sendall(encode(message))  # a few bytes, which the socket's buffer takes
    except OSError:
        return  # what the agent said last, and that it ended, is told by reading


def _messages(connection: socket.socket, address: SocketAddress, until: float) -> Iterator[ToClient]:
    """Give what the agent sends, message by message, for ever.

    :raises AgentUnavailable: it ended, or said nothing until ``until``.
    """
    reader = MessageReader(MAX_MESSAGE)
    while True:
        try:
            data = connection.recv(RECEIVE)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise AgentUnavailable(
                    f"the agent at {address} does not answer",
                    hint="it hangs or is stopped; see its log, and restart it",
                ) from None
            poll(connection.fileno(), read=True, write=False, until=until)
            continue
        except OSError as error:
            raise AgentUnavailable(f"the connection to the agent at {address} broke: {error.strerror}") from error
        if not data:
            raise AgentUnavailable(f"the agent at {address} ended the connection", hint="see its log")
        yield from map(decode_to_client, reader.feed(data))
