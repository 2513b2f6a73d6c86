"""What both sessions are: a rank of a group at this node's agent, and after the loss of that agent at the next one."""

from __future__ import annotations

import copy
import os

from allreduced.client.attach import Attached
from allreduced.client.buffers import Block
from allreduced.client.staging import ArenaRequest
from allreduced.core.errors import AgentUnavailable, AllReducedError, ClosedError, InternalError
from allreduced.protocol.local import Joined

CLOSE_SECONDS = 5.0
"""How long close() waits for the agent to take what was not sent yet."""


class Attachment:
    """A joined connection, to be replaced when its agent was lost. The base of both sessions."""

    def __init__(self, attached: Attached) -> None:
        self._pid = os.getpid()
        self._left = False
        self._use(attached)

    def _use(self, attached: Attached) -> None:
        """Go on with this connection."""
        joined = attached.conversation.joined
        if joined is None:
            raise InternalError("a session was made before its group was joined")
        self._connection = attached.connection
        self._conversation = attached.conversation
        self._receiver = attached.receiver
        self._options = attached.options
        self._closed = False
        self.joined: Joined = joined

    @property
    def shared_memory(self) -> bool:
        """Whether tensors travel in shared memory."""
        return self._conversation.shared_memory

    @property
    def inline_limit(self) -> int:
        """Bytes of a tensor that travel inside messages at most."""
        welcome = self._conversation.welcome
        return welcome.inline_limit if welcome is not None else 0

    def tell(self, error: AllReducedError | None) -> None:
        """Take note that a caller gets the error of an operation; None: it has none."""
        if error is not None:
            self._conversation.tell(error)

    def _granted(self, request: ArenaRequest) -> Block:
        """Return what an answered request for memory brought.

        :raises AllReducedError: why it brought nothing.
        """
        block, request.block = request.block, None
        if request.error is not None:
            self.tell(request.error)
            raise copy.copy(request.error)
        if block is None:
            raise InternalError("an arena was granted that has no room for what it was asked for")
        return block

    def _hung(self) -> AgentUnavailable:
        """Return the error for an agent that does not answer."""
        return AgentUnavailable(
            "the agent of this node did not answer, long after the deadline",
            hint="it hangs or is stopped; see its log, and restart it",
        )

    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this communicator belongs to process {self._pid}, from which this process was forked",
                hint="call connect() again in this process, with a rank of its own",
            )

    def _check_open(self) -> None:
        if self._left:
            raise ClosedError("the communicator was closed")
