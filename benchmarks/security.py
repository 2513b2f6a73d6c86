"""What mutual TLS costs: two agents with a secret and two with certificates, in turns, and the ratio.

``make bench-security`` runs it. Two nodes of one rank on this machine, over loopback. What counts of a call is its
slower rank, and of a row the median. Beside it stand two programs in C that exchange the same bytes, one of them with
OpenSSL: what encryption costs there it costs everybody on this processor. The last row is the cipher alone, as
``openssl speed`` has it with two processes at once: each agent encrypts and decrypts as many bytes as the tensor has.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from allreduced.client import Communicator, connect

ROOT = Path(__file__).parents[1]
Array: TypeAlias = "npt.NDArray[np.float32]"

NODES = ("node0", "node1")
MODES = ("secret", "mtls")
PROGRAMS = {"secret": "exchange", "mtls": "tls_exchange"}
"""Of ``limits/``, by mode."""
CIPHER = "aes-256-gcm"
"""What OpenSSL chooses for TLS 1.3 where both sides leave it to it."""
RECORD = 16384
"""Bytes."""
GOAL = 0.5
"""Throughput with certificates over that with a secret, at least."""


@dataclass(frozen=True, slots=True)
class Row:
    """How a tensor is handed over. ``call(comm, tensor)`` reduces it."""

    title: str
    in_shared_memory: bool
    call: Callable[[Communicator, Array], Array]


ROWS = {
    "array": Row("new array", False, lambda comm, x: comm.all_reduce(x)),
    "views": Row("views of shared memory", True, lambda comm, x: comm.all_reduce(x, view=True)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=21, help="calls that count (default: %(default)s)")
    parser.add_argument("--mib", type=int, default=64, help="size of the tensor (default: %(default)s)")
    parser.add_argument("--flows", type=int, default=2, help="data connections per link (default: %(default)s)")
    parser.add_argument("--limits", type=Path, default=ROOT / "build" / "limits", help="where the C programs are")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sockets", nargs=len(MODES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        measure(arguments.rank, arguments.sockets, arguments.mib << 20, arguments.iterations)
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        certify(folder)
        before = limits(arguments.limits, folder, arguments)
        found = run(stack, folder, arguments)
        after = limits(arguments.limits, folder, arguments)
        found |= {"limits": {mode: [min(before[mode], after[mode])] for mode in MODES}}
        found |= {"cipher": {"mtls": [cipher_seconds(arguments.mib << 20)]}}
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"2 x 1, loopback TCP, {arguments.mib} MiB float32, {os.cpu_count()} CPUs")
    print(f"{'':24}{'secret ms':>10}{'mtls ms':>10}{'throughput':>12}  goal")
    for key, row in ROWS.items():
        plain, encrypted = (statistics.median(found[key][mode]) for mode in MODES)
        ratio = plain / encrypted
        verdict = "met" if ratio >= GOAL else "missed"
        print(f"{row.title:24}{plain * 1e3:10.1f}{encrypted * 1e3:10.1f}{ratio:12.2f}  >= {GOAL:g}: {verdict}")
    plain, encrypted = (found["limits"][mode][0] for mode in MODES)
    print(f"{'C, one connection':24}{plain * 1e3:10.1f}{encrypted * 1e3:10.1f}{plain / encrypted:12.2f}")
    print(f"{CIPHER + ' alone':24}{'':10}{found['cipher']['mtls'][0] * 1e3:10.1f}")


def certify(folder: Path) -> None:
    """Make an authority and the certificates of the nodes."""
    certs = [sys.executable, "-m", "allreduced.cli.main", "certs"]
    for command in (["ca"], ["node", *NODES]):
        subprocess.run([*certs, *command, "--directory", str(folder)], check=True, stdout=subprocess.DEVNULL)


def limits(programs: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Return by mode the seconds that the fastest variant in C takes."""
    found: dict[str, float] = {}
    for mode, program in PROGRAMS.items():
        command = [str(programs / program), str(arguments.mib << 20), str(arguments.iterations)]
        if mode == "mtls":
            command += [str(folder / f"{NODES[0]}.pem"), str(folder / f"{NODES[0]}.key")]
        lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        found[mode] = min(float(json.loads(line)["seconds"]) for line in lines)
    return found


def cipher_seconds(nbytes: int) -> float:
    """Return how long both agents encrypt and decrypt so many bytes, each on a core of its own."""
    command = ["openssl", "speed", "-seconds", "2", "-multi", str(len(NODES)), "-bytes", str(RECORD), "-evp", CIPHER]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    together = float(said.split()[-1].removesuffix("k")) * 1000  # bytes per second
    return 2 * len(NODES) * nbytes / together


def run(stack: ExitStack, folder: Path, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Start agents and ranks; return the times of all rows and modes in seconds."""
    places = [start(stack, folder, mode, arguments.flows) for mode in MODES]
    command = [sys.executable, "-m", "benchmarks.security", "--mib", str(arguments.mib)]
    command += ["--iterations", str(arguments.iterations)]
    ranks = []
    for rank in range(len(NODES)):
        sockets = [sockets_of[rank] for sockets_of in places]
        whole = [*command, "--rank", str(rank), "--sockets", *sockets]
        ranks.append(subprocess.Popen(whole, stdout=subprocess.PIPE if rank == 0 else None, text=True))
        stack.callback(ranks[-1].kill)
    output, _ = ranks[0].communicate()
    if any(rank.wait() for rank in ranks):
        raise SystemExit("a rank failed")
    found: dict[str, dict[str, list[float]]] = json.loads(output)
    return found


def start(stack: ExitStack, folder: Path, mode: str, flows: int) -> list[str]:
    """Start the agents of one mode; return the sockets of their clients."""
    sockets: list[str] = []
    listen = ""
    for node in NODES:
        name = f"@allreduced-bench-{secrets.token_hex(8)}"
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("ALLREDUCED_")},
            "ALLREDUCED_SECRET": "of this measurement",
            "ALLREDUCED_PEERS_FLOWS": str(flows),
        }
        if mode == "mtls":
            environment |= {
                "ALLREDUCED_SECURITY_MODE": mode,
                "ALLREDUCED_SECURITY_CA": str(folder / "ca.pem"),
                "ALLREDUCED_SECURITY_CERTIFICATE": str(folder / f"{node}.pem"),
                "ALLREDUCED_SECURITY_KEY": str(folder / f"{node}.key"),
            }
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "allreduced.cli.main", "agent", "--node", node, "--socket", name]
        command += ["--listen", "tcp://127.0.0.1:0", "--ready-fd", str(writing)]
        command += ["--peer", f"{NODES[0]}={listen}"] if listen else []
        agent = subprocess.Popen(command, pass_fds=[writing], env=environment)
        stack.callback(agent.wait)
        stack.callback(agent.terminate)
        os.close(writing)
        with os.fdopen(reading) as ready:
            listen = json.loads(ready.readline())["listen"]
        sockets.append(name)
    return sockets


def measure(rank: int, sockets: Sequence[str], nbytes: int, iterations: int) -> None:
    """Be one rank: call in turns on both pairs of agents; the first rank prints the times."""
    comms = [connect(job="security", rank=rank, size=len(NODES), socket=socket) for socket in sockets]
    found: dict[str, dict[str, list[float]]] = {}
    for key, row in ROWS.items():
        count = nbytes // 4
        tensors = [
            comm.empty((count,), "float32") if row.in_shared_memory else np.empty(count, "float32") for comm in comms
        ]
        times = np.zeros((len(MODES), iterations))
        for iteration in range(-3, iterations):
            for number, (comm, tensor) in enumerate(zip(comms, tensors, strict=True)):
                tensor.fill(rank + 1)
                comm.barrier()
                began = time.perf_counter()
                result = row.call(comm, tensor)
                comm.barrier()
                took = time.perf_counter() - began
                values = np.asarray(result)
                if values[0] != 3 or values[-1] != 3:
                    raise SystemExit(f"the sum of 1 and 2 is {values[0]}")
                del result, values
                if iteration >= 0:
                    times[number, iteration] = took
        slowest = comms[0].all_reduce(times, op="max")
        found[key] = {mode: slowest[number].tolist() for number, mode in enumerate(MODES)}
    if rank == 0:
        print(json.dumps(found))
    for comm in comms:
        comm.close()


if __name__ == "__main__":
    main()
