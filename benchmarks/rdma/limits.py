"""What bare verbs do: ``ib_write_bw`` of perftest, and the ring of ``benchmarks/limits/rdma_ring.c``."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Final

DEVICE: Final = "rxe0"
SECONDS: Final = 120.0
RING: Final = Path(__file__).parents[2] / "build" / "limits" / "rdma_ring"


def gid_index(address: str = "0a4d:0001") -> int:
    """Return the index of the GID that ends so."""
    table = Path(f"/sys/class/infiniband/{DEVICE}/ports/1/gids")
    return next(int(entry.name) for entry in table.iterdir() if entry.read_text().strip().endswith(address))


def write_bandwidth(nbytes: int, message: int) -> float:
    """Return the bytes per second of ``ib_write_bw`` for ``nbytes`` in messages of that size."""
    words = [
        "ib_write_bw",
        "-d",
        DEVICE,
        "-x",
        str(gid_index()),
        "-s",
        str(message),
        "-n",
        str(nbytes // message),
        "-F",
    ]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            said = _client([*words, "127.0.0.1"])
            server.wait(SECONDS)
        finally:
            server.kill()
    for line in said.splitlines():
        fields = line.split()
        if len(fields) == 5 and fields[0] == str(message):
            return float(fields[3]) * (1 << 20)  # its MB are 2^20 bytes
    raise SystemExit(f"ib_write_bw said: {said}")


def _client(words: list[str]) -> str:
    """Run the client until it finds its server, which does not say when it is ready; return what it says."""
    until = time.monotonic() + SECONDS
    while True:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode == 0:
            return done.stdout
        if time.monotonic() > until:
            raise SystemExit(f"{words[0]} failed: {done.stdout}{done.stderr}")
        time.sleep(0.5)


def ring_seconds(nodes: int, nbytes: int, times: int, variant: str = "") -> dict[str, float]:
    """Return the seconds of an all-reduce on the bare ring, the median of ``times``, by one or each of its variants."""
    words = [str(RING), DEVICE, str(gid_index()), str(nodes), str(nbytes), str(times)]
    if variant:
        kib, way = variant.split(" KiB, ")
        words += [str(int(kib) << 10), str(int(way == "events"))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=2 * SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"the bare ring failed: {done.stderr}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["variant"]: line["seconds"] for line in lines}
