"""Whether the kernel still offers a device that is in use.

A driver that can take a device away from programs sends them an asynchronous event (``IBV_EVENT_DEVICE_FATAL``).
Others, soft-RoCE among them, tell programs nothing when a device is to be removed, and wait until all have closed it.
What can be seen is that its entry for programs is gone by then (Linux: ``ib_uverbs_remove_one``).
"""

from __future__ import annotations

from pathlib import Path

from allreduced.transports.rdma.host import offered


class Presence:
    """Of one device, from now on. Where the kernel tells of none of that name, it never ends."""

    def __init__(self, device: str) -> None:
        self._entry = offered().get(device)
        self._identity = _identity(self._entry)

    def is_over(self) -> bool:
        """Tell whether the device is being removed, also where there is another one of its name now. A few µs."""
        return self._identity is not None and _identity(self._entry) != self._identity


def _identity(entry: Path | None) -> tuple[int, int] | None:
    if entry is None:
        return None
    try:
        found = entry.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
