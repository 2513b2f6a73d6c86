"""Tells whoever started the agent that it is ready, or why it is not: a line on a pipe, and systemd's notification."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping

from allreduced.core.errors import AllReducedError, to_wire

logger = logging.getLogger("allreduced.agent")


class Readiness:
    """Says it once. ``ready_fd``: an inherited descriptor, or None; it is closed after the line."""

    def __init__(self, ready_fd: int | None, environ: Mapping[str, str]) -> None:
        self._fd = ready_fd
        self._notify = environ.get("NOTIFY_SOCKET", "")
        if ready_fd is not None:
            os.set_inheritable(ready_fd, False)

    def ready(self, sock: str, listen: str) -> None:
        """Say where clients (``sock``) and other agents (``listen``, may be empty) find this agent."""
        self._line({"ready": True, "socket": sock, "listen": listen, "pid": os.getpid()})
        self._systemd(f"READY=1\nSTATUS=serving clients at {sock}")

    def failed(self, error: AllReducedError) -> None:
        """Say why the agent did not start."""
        self._line({"error": to_wire(error)})

    def stopping(self) -> None:
        """Say that the agent stops."""
        self._systemd("STOPPING=1")

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

    def _systemd(self, state: str) -> None:
        """Notify the service manager; the protocol is a datagram (sd_notify(3))."""
        if not self._notify.startswith(("/", "@")):
            return
        address = f"\0{self._notify[1:]}" if self._notify.startswith("@") else self._notify
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            try:
                notify.sendto(state.encode(), address)
            except OSError as error:
                logger.warning("event=notify_failed error=%r", error.strerror)
