"""An agent that may do less than root: ``memlock=BYTES`` of locked memory, and files by their permissions only."""

from __future__ import annotations

import ctypes
import resource
import struct
from typing import Final

from allreduced.cli.main import main

_CAPSET: Final = 126
"""Number of the system call on x86-64."""
_VERSION_3: Final = 0x20080522
_DAC_OVERRIDE, _DAC_READ_SEARCH, _IPC_LOCK, _SYS_RESOURCE = 1, 2, 14, 24


def agent(words: list[str]) -> int:
    """Give up what the first word says, then be ``allreduced`` with the others. Run by the nursery."""
    limit, *rest = words
    nbytes = int(limit.removeprefix("memlock="))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, nbytes))
    kept = ~sum(1 << bit for bit in (_DAC_OVERRIDE, _DAC_READ_SEARCH, _IPC_LOCK, _SYS_RESOURCE))
    halves = kept & 0xFFFFFFFF, (kept >> 32) & 0x1FF
    header = struct.pack("=Ii", _VERSION_3, 0)
    data = b"".join(struct.pack("=III", half, half, 0) for half in halves)
    if ctypes.CDLL(None, use_errno=True).syscall(_CAPSET, header, data):
        raise OSError(ctypes.get_errno(), "capset")
    return main(rest)
