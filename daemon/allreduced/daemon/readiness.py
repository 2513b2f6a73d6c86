"""Tells whoever started the agent that it is ready, or why it is not: a line on a pipe."""

from __future__ import annotations

import json
import logging
import os

from allreduced.core.errors import AllReducedError, to_wire

logger = logging.getLogger("allreduced.agent")


class Readiness:
    """Says it once. ``ready_fd``: an inherited descriptor, or None; it is closed after the line."""

    def __init__(self, ready_fd: int | None) -> None:
        self._fd = ready_fd
        if ready_fd is not None:
            os.set_inheritable(ready_fd, False)

    def ready(self, sock: str, listen: str) -> None:
        """Say where clients (``sock``) and other agents (``listen``, may be empty) find this agent."""
        self._line({"ready": True, "socket": sock, "listen": listen, "pid": os.getpid()})

    def failed(self, error: AllReducedError) -> None:
        """Say why the agent did not start."""
        self._line({"error": to_wire(error)})

    def _line(self, value: object) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            os.write(fd, json.dumps(value).encode() + b"\n")
        except OSError as error:  # nobody waits any more
            logger.warning("event=ready_line_lost error=%r", error.strerror)
        finally:
            os.close(fd)
