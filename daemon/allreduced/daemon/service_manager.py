"""Tells the service manager how the agent is: the datagrams of sd_notify(3), without libsystemd."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger("allreduced.agent")

PATIENCE = 1.0
"""Seconds that a message that must not be lost waits for a manager that is busy."""

LONGEST_STATUS = 500
"""Characters of a status at most; it is shown in one line."""

_MICRO = 1_000_000


class ServiceManager:
    """Speaks to whoever ``NOTIFY_SOCKET`` names; says nothing where it is not set.

    ``clock``: microseconds of CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        pid: int | None = None,
        clock: Callable[[], int] = lambda: time.monotonic_ns() // 1000,
    ) -> None:
        where = environ.get("NOTIFY_SOCKET", "")
        # "vsock:…" is for virtual machines, whose own manager speaks it, not their services.
        self._address = f"\0{where[1:]}" if where.startswith("@") else where if where.startswith("/") else ""
        self._watchdog = watchdog_seconds(environ, os.getpid() if pid is None else pid)
        self._clock = clock
        self._status = ""
        self._lost = False

    @property
    def listens(self) -> bool:
        """True where there is a service manager."""
        return bool(self._address)

    @property
    def watchdog(self) -> float | None:
        """Seconds within which :meth:`alive` must be called again; None where nobody watches."""
        return self._watchdog if self._address else None

    def ready(self, status: str) -> None:
        """Say that the agent serves now, after a start or a reload."""
        self._send("READY=1", self._told(status), keep=True)

    def reloading(self) -> None:
        """Say that the settings are read again; :meth:`ready` says that it is over."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={self._clock()}", keep=True)

    def stopping(self, status: str, seconds: float) -> None:
        """Say that the agent ends, which may take ``seconds``."""
        extend = f"EXTEND_TIMEOUT_USEC={int(seconds * _MICRO)}"
        self._send("STOPPING=1", extend, self._told(status), keep=True)

    def failed(self, reason: str, errno: int = 0) -> None:
        """Say why the agent cannot run; ``errno``: what the system said, 0 where it is not about that."""
        said = [self._told(reason)]
        if errno:
            said.append(f"ERRNO={errno}")
        self._send(*said, keep=True)

    def alive(self, status: str) -> None:
        """Feed the watchdog, if there is one, and tell the status where it is another one. Does not block."""
        said = [] if self._watchdog is None else ["WATCHDOG=1"]
        if status != self._status:
            said.append(self._told(status))
        if said:
            self._send(*said, keep=False)

    def _told(self, status: str) -> str:
        self._status = status
        return f"STATUS={' '.join(status.split())[:LONGEST_STATUS]}"

    def _send(self, *lines: str, keep: bool) -> None:
        if not self._address:
            return
        told = "\n".join(lines).encode("utf-8", "backslashreplace")  # names of files need not be UTF-8
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
                notify.settimeout(PATIENCE if keep else 0.0)
                notify.sendto(told, self._address)
        except OSError as error:
            self._status = ""  # it is told again
            if not self._lost:
                logger.warning("event=notify_failed error=%r", error.strerror or str(error))
            self._lost = True
        else:
            self._lost = False


def watchdog_seconds(environ: Mapping[str, str], pid: int) -> float | None:
    """Return what sd_watchdog_enabled(3) does, in seconds; None where this process is not watched."""
    usec, whom = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isascii() or not usec.isdecimal() or int(usec) <= 0:
        return None
    return int(usec) / _MICRO if whom in ("", str(pid)) else None
