"""What the kernel says that processes hold of RDMA devices: protection domains, queues, pairs, regions, contexts."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Collection, Mapping
from typing import Final, TypeAlias

KINDS: Final = ("pd", "cq", "qp", "mr", "ctx")

Held: TypeAlias = "dict[tuple[str, str], int]"
"""How many of each kind of each device."""

BACK_SECONDS: Final = 20.0
"""A process that was killed gives back what it held while it ends, which its parent may not have waited for."""


def parse(text: str) -> Held:
    """Return what ``rdma -j resource show`` said."""
    return {(device["ifname"], kind): int(device.get(kind, 0)) for device in json.loads(text) for kind in KINDS}


def held() -> Held:
    """Return what is held now, on this machine, by all processes and the kernel itself."""
    return parse(_rdma("resource", "show"))


def holders() -> str:
    """Return who holds queue pairs, regions and domains, line by line."""
    return "".join(_rdma("resource", "show", kind, json_form=False) for kind in ("qp", "mr", "pd"))


def surplus(
    before: Mapping[tuple[str, str], int], after: Mapping[tuple[str, str], int], kinds: Collection[str] = KINDS
) -> dict[str, int]:
    """Return what is held in addition to what was held before: ``{"rxe0 qp": 2}``."""
    more = {key: count - before.get(key, 0) for key, count in after.items() if key[1] in kinds}
    return {" ".join(key): count for key, count in more.items() if count > 0}


def wait_until_back(
    before: Mapping[tuple[str, str], int], seconds: float = BACK_SECONDS, kinds: Collection[str] = KINDS
) -> dict[str, int]:
    """Wait until nothing more is held than before; return what still is after ``seconds``."""
    until = time.monotonic() + seconds
    while (more := surplus(before, held(), kinds)) and time.monotonic() < until:
        time.sleep(0.05)  # the kernel tells nobody
    return more


def _rdma(*words: str, json_form: bool = True) -> str:
    command = ["rdma", *(["-j"] if json_form else []), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
