"""The client SDK: ``connect()`` attaches this process to its node's agent and returns a communicator.

Needs NumPy and msgpack only, starts no thread, and imports nothing of the agent. Read it in this order:
``communicator`` with ``reducing`` and ``moving`` (what users call; ``async_…`` for event loops), ``call`` and
``operation`` (a call, checked and cut into parts), ``conversation`` (the protocol, without IO), with ``staging`` (how
inputs get to the agent), ``uses`` (how often a name was called) and ``outbox`` (what waits to be sent), ``session`` and
``async_session`` (who moves its bytes: blocking callers, an event loop), ``leaving`` (where nobody closed them),
``buffers`` (shared memory), ``attach`` and ``private_agent`` (how a connection is made, and again after the loss of the
agent), ``environment`` (who am I).
"""

from allreduced.client.async_communicator import AsyncCommunicator
from allreduced.client.async_work import AsyncWork
from allreduced.client.communicator import Communicator, connect
from allreduced.client.operation import WorkInfo
from allreduced.client.work import Work
from allreduced.core.errors import (
    AgentUnavailable,
    AllReducedError,
    AuthenticationError,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    GroupChanged,
    InvalidArgument,
    LimitExceeded,
    MismatchError,
    PeerLost,
    ProtocolError,
    RankClaimed,
    RankLost,
    WaitTimeout,
)

__all__ = [
    "AgentUnavailable",
    "AllReducedError",
    "AsyncCommunicator",
    "AsyncWork",
    "AuthenticationError",
    "ClosedError",
    "Communicator",
    "ConfigError",
    "DeadlineExceeded",
    "GroupChanged",
    "InvalidArgument",
    "LimitExceeded",
    "MismatchError",
    "PeerLost",
    "ProtocolError",
    "RankClaimed",
    "RankLost",
    "WaitTimeout",
    "Work",
    "WorkInfo",
    "connect",
]
