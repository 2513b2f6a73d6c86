"""The device of the guest, as tests break and mend it: its removal, its port, who holds queue pairs."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Final

from tests.rdma.addresses import host

NAME: Final = "rxe0"
INTERFACE: Final = "rdma0"
NODES: Final = 4
SECONDS: Final = 30.0
_GIDS: Final = Path(f"/sys/class/infiniband/{NAME}/ports/1/gids")


def command(*words: str) -> str:
    """Run a command of the guest that must succeed; return what it says."""
    return subprocess.run(words, check=True, timeout=SECONDS, capture_output=True, text=True).stdout


def remove() -> None:
    """Remove the device. Returns once nobody holds it.

    :raises subprocess.TimeoutExpired: somebody does.
    """
    command("rdma", "link", "delete", NAME)


def restore() -> None:
    """Make the device again if it is not there, bring its port up and all addresses back, and wait for the GIDs."""
    command("ip", "link", "set", INTERFACE, "up")
    for node in range(NODES):  # those of IPv6 go with the interface
        command("ip", "address", "replace", f"{host(node, 'ipv6').strip('[]')}/64", "dev", INTERFACE)
    if not _GIDS.exists():
        command("rdma", "link", "add", NAME, "type", "rxe", "netdev", INTERFACE)
    until = time.monotonic() + SECONDS
    while not _has_all_gids():
        assert time.monotonic() < until, "the device has not the GIDs of all addresses"
        time.sleep(0.05)  # the kernel tells nobody


def port_down() -> None:
    """Take its port down."""
    command("ip", "link", "set", INTERFACE, "down")


def queue_pairs() -> frozenset[int]:
    """Return the numbers of all queue pairs that processes have."""
    held = json.loads(command("rdma", "-j", "resource", "show", "qp"))
    return frozenset(int(pair["lqpn"]) for pair in held if pair.get("pid") and pair.get("type") == "RC")


def _has_all_gids() -> bool:
    wanted = {f"{prefix}:{node + 1:04x}" for node in range(NODES) for prefix in ("0a4d", "0000")}
    found = set()
    for entry in _GIDS.iterdir() if _GIDS.exists() else ():
        try:
            found.add(entry.read_text().strip()[-9:])
        except OSError:
            continue  # an entry that is not set
    return wanted <= found
