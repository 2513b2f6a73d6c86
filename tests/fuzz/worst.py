"""Prints what the most expensive inputs of their size cost the readers: ``python -m tests.fuzz.worst``.

Processor time of one parse, the least of several runs. The loop of an agent is held up that long by one message.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import msgpack

from allreduced.core.errors import ProtocolError
from allreduced.protocol import local, peer

RUNS = 5
LIMIT = 50e-3


def bodies() -> list[tuple[str, Callable[[bytes], object], bytes]]:
    """Return inputs of the largest size that is read: what they are, their reader, the bytes."""
    ids = [(1 << 64) - 1] * 65536
    key = [1000, "j" * 256, "w" * 256]
    failure = ["peer_lost", "lost", "", {"ranks": list(range(30)), "nodes": []}]
    member = ["n" * 256, (1 << 64) - 1, [0]]
    of_clients = [
        ("65,536 leases", msgpack.packb([7, ids])),
        ("65,536 leases, the last one is none", msgpack.packb([7, [*ids[:-1], "x"]])),
        ("1,900,000 small numbers", msgpack.packb([7, [0] * 1_900_000])),
        ("2 MiB of arrays in arrays", b"\x92\x07" + b"\x91" * (local.MAX_MESSAGE - 3) + b"\x00"),
        ("400,000 headers of long arrays", b"\x92\x07" + b"\xdd\x00\x00\xff\xff" * 400_000),
        ("30 arrays of 60,000", msgpack.packb([7, [[0] * 60000] * 30])),
        ("a map of 150,000", b"\x92\x07" + msgpack.packb({str(number): number for number in range(150_000)})),
        ("a text of 1.8 MB", msgpack.packb([2, 1, "\u00e9" * 900_000])),
        ("1 MiB of data", local.encode(local.Upload(1, bytes(local.CHUNK)))[4:]),
        ("65,535 empty maps", b"\x92\x07\xdc\xff\xff" + b"\x80" * 65535),
    ]
    of_agents = [
        ("a proposal of 32,768 ranks", 19, True, [key, 1 << 20, [["n", 1, list(range(32768))]], ids[:32768]]),
        ("a proposal of 3,700 long names", 19, True, [key, 1, [member] * 3700, [0]]),
        ("16,384 grants", 33, True, ["w", 1, 0, [[1, 0, 0, 0, 1, b"t" * 8]] * 16384]),
        ("30,000 results of a change", 26, True, [1, 0, 0, 0, [], [], [], [["w", 1, [0]]] * 30000, [], 1, []]),
        ("8,000 failures of a change", 26, True, [1, 0, 0, 0, [], [], [], [], [["w", 1, failure]] * 8000, 1, []]),
        ("8,192 peers", 3, False, [[["n" * 60, "tcp://" + "h" * 50]] * 8192]),
        ("1 MiB of small numbers", 42, True, [[0] * 1_000_000, False]),
        ("nested arrays", 42, True, None),
    ]
    found: list[tuple[str, Callable[[bytes], object], bytes]] = [
        (name, local.decode_to_agent, body[: local.MAX_MESSAGE]) for name, body in of_clients
    ]
    for name, code, grouped, fields in of_agents:
        body = b"\x92" + b"\x91" * 1_000_000 if fields is None else msgpack.packb(fields)
        body = body[: peer.MAX_FRAME - peer.HEADER.size]
        group, generation = (7, 1) if grouped else (0, 0)
        header = peer.HEADER.pack(peer.MAGIC, peer.VERSION, code, 0, generation, group, len(body))
        found.append((f"frame: {name}", peer.decode, header + body))
    return found


def main() -> int:
    """Print the table; return 1 where an input takes too long."""
    worst = 0.0
    sys.stdout.write(f"{'input':44} {'bytes':>9} {'ms':>8}  outcome\n")
    for name, decode, body in bodies():
        least, outcome = 1e9, ""
        for _ in range(RUNS):
            began = time.process_time()
            try:
                outcome = type(decode(body)).__name__
            except ProtocolError as error:
                outcome = error.message[:60]
            least = min(least, time.process_time() - began)
        worst = max(worst, least)
        sys.stdout.write(f"{name:44} {len(body):9} {least * 1e3:8.2f}  {outcome}\n")
    sys.stdout.write(f"the worst takes {worst * 1e3:.2f} ms, {LIMIT * 1e3:.0f} are allowed\n")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
