"""Sockets to agents: opening one with a check of who is behind it, and moving bytes over it."""

from __future__ import annotations

import array
import errno
import os
import socket
import stat
import struct
import time
from pathlib import Path

from allreduced.client.buffers import MORE_FILES
from allreduced.client.conversation import MAX_DESCRIPTORS, Conversation
from allreduced.client.environment import SYSTEM_SOCKET
from allreduced.client.waiting import Procedure, Wait
from allreduced.core.addresses import SocketAddress
from allreduced.core.errors import AgentUnavailable, AllReducedError, ConfigError, LimitExceeded

RECEIVE = 256 << 10
"""Bytes taken from the socket at a time."""

ACCEPT_SECONDS = 30.0
"""How long an agent may leave a connection in its queue; one that takes longer hangs, or is flooded."""

_PAUSE, _LONGEST_PAUSE = 0.005, 0.05
"""Seconds between two tries to get into a full queue; they grow. The system tells nobody who may not block of room."""

# As plain numbers: flags of an enumeration cost microseconds to combine.
_RECEIVE_FLAGS = int(socket.MSG_CMSG_CLOEXEC) | int(socket.MSG_DONTWAIT)
_SEND_FLAGS = int(socket.MSG_DONTWAIT) | int(socket.MSG_NOSIGNAL)
_TRUNCATED = int(socket.MSG_CTRUNC)

_DESCRIPTOR_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


class QueueFull(AgentUnavailable):
    """An agent listens there, but as many connections as may wait for it do so already."""


def reach(address: SocketAddress, *, path: str, until: float, trusting: bool = False) -> Procedure[socket.socket]:
    """Return a connection as :func:`open_socket` does; wait while the agent's queue is full.

    Not past ``until``, on the clock of ``time.monotonic``, and ``ACCEPT_SECONDS`` at most. Errors as there.

    :raises QueueFull: it was full all the time.
    """
    until = min(until, time.monotonic() + ACCEPT_SECONDS)
    pause = _PAUSE
    while True:
        try:
            return open_socket(address, path=path, trusting=trusting)
        except QueueFull:
            now = time.monotonic()
            if now >= until:
                raise
        yield Wait(-1, write=False, until=min(until, now + pause))
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def open_socket(address: SocketAddress, *, path: str, trusting: bool = False) -> socket.socket:
    """Return a non-blocking connection to the agent at ``address``; ``path`` says where the address comes from.

    The agent's uid must be root's or this process's, or own the directory of the system's agent: whoever is there
    gets this process's tensors. ``trusting``: it may be anybody's, for it is told nothing.

    :raises AgentUnavailable: nobody answers there.
    :raises QueueFull: an agent does, but too many wait for it.
    :raises ConfigError: what is there is no socket, or somebody else's.
    """
    trusted = {0, os.geteuid()}
    if not address.abstract:
        _check_file(address, trusted, path, trusting=trusting)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        connection.connect(address.sockaddr)
        _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in trusted and not trusting:
            raise ConfigError(
                f"the agent at {address} runs as uid {uid}, which is neither root nor uid {os.geteuid()}",
                path=path,
                hint="name the socket of an agent that you trust",
            )
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise _unreachable(address, error) from error
        raise
    return connection


def _check_file(address: SocketAddress, trusted: set[int], path: str, *, trusting: bool) -> None:
    place = Path(address.text)
    try:
        found = place.stat()
        if address.text == SYSTEM_SOCKET:
            trusted.add(place.parent.stat().st_uid)  # only root can make a directory there, and gives it to the agent
    except OSError as error:
        raise _unreachable(address, error) from error
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{address} is not a socket", path=path, hint="give the path of an agent's socket")
    if found.st_uid not in trusted and not trusting:
        raise ConfigError(
            f"{address} belongs to uid {found.st_uid}, which is neither root nor uid {os.geteuid()}",
            path=path,
            hint="name the socket of an agent that you trust",
        )


def _unreachable(address: SocketAddress, error: OSError) -> AgentUnavailable:
    if error.errno == errno.EAGAIN:
        return QueueFull(
            f"the agent at {address} takes no connection: its queue is full",
            hint="it hangs, is stopped, or somebody floods it with connections; see its log",
        )
    reason = {
        errno.ENOENT: "there is no such file",
        errno.ENOTDIR: "there is no such file",
        errno.ECONNREFUSED: "nobody listens there" + ("" if address.abstract else ", the file is left over"),
        errno.EACCES: "this user may not use it",
    }.get(error.errno or 0, error.strerror or str(error))
    return AgentUnavailable(
        f"no agent answers at {address}: {reason}",
        hint=f"start one with: allreduced agent --socket {address}",
    )


_NO_DESCRIPTORS: array.array[int] = array.array("i")


class Receiver:
    """Takes bytes and descriptors from a connection and feeds them to its conversation."""

    def __init__(self, connection: socket.socket, conversation: Conversation) -> None:
        self._connection = connection
        self._conversation = conversation
        self._buffer = memoryview(bytearray(RECEIVE))

    def receive(self) -> bool:
        """Feed what has arrived, without waiting; return whether there may be more to take at once.

        Whatever ends the connection ends the conversation with the fitting error; nothing is raised.
        """
        try:
            nbytes, ancillary, flags, _ = self._connection.recvmsg_into(
                [self._buffer], _DESCRIPTOR_BYTES, _RECEIVE_FLAGS
            )
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._conversation.fail(AgentUnavailable(f"the connection to the agent broke: {error}"))
            return True
        descriptors = array.array("i") if ancillary else _NO_DESCRIPTORS
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if nbytes == 0:
            self._conversation.fail(
                AgentUnavailable("the agent of this node ended", hint="see its log; call connect() again")
            )
        else:
            try:
                if flags & _TRUNCATED:
                    raise LimitExceeded("this process has no descriptor left for shared memory", hint=MORE_FILES)
                self._conversation.feed(self._buffer[:nbytes], descriptors)
                # A stream socket gives all it has, but stops behind a message with a descriptor.
                return bool(ancillary) or nbytes == RECEIVE
            except AllReducedError as error:
                self._conversation.fail(error)
            except BaseException:
                # Ctrl-C in the middle of it: what had arrived is lost, and with it the meaning of what follows.
                self._conversation.fail(AgentUnavailable("the connection was interrupted while a message was read"))
                raise
        return True


def transmit(connection: socket.socket, conversation: Conversation) -> None:
    """Send what the conversation wants sent, as far as the socket takes it without waiting."""
    while conversation.has_output:
        pieces = conversation.output()
        if not pieces:
            return
        try:
            if len(pieces) == 1:
                sent = connection.send(pieces[0], _SEND_FLAGS)
            else:
                sent = connection.sendmsg(pieces, (), _SEND_FLAGS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            # The receiving side learns why: what the agent said last may still be there to be read.
            conversation.discard_output()
            return
        except BaseException:
            # A signal's handler raised: how much went out is not known, and nothing may go out twice.
            conversation.fail(AgentUnavailable("the connection was interrupted while a message was sent"))
            conversation.discard_output()
            raise
        conversation.sent(sent)
