"""Fuzzes the parsers: ``python -m tests.fuzz --inputs 10000000`` (``make fuzz INPUTS=10000000``).

Runs atheris where it can be imported, with coverage of the parsers (their generated functions too), else a plain
mutator. Stops at the first input that raises what it must not, that takes more than 50 ms of processor time, or that
lets the process grow; the input is printed. Prints the slowest input and the memory at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tests.fuzz.corpus import corpus, keep

LONGEST = 50e-3
"""Seconds of processor time that one input may take; with coverage on, twice to thrice what it takes else."""

LARGE = 1 << 16
"""Bytes of the longest inputs; every hundredth is that long at most, all others are short."""

MEMORY_MB = 768
"""Memory that the process may take with coverage on."""

GROWTH_MB = 256
"""Memory that the process may take in addition while it parses."""

LOOK_EVERY = 1000
"""Inputs between two looks at that."""


class Watch:
    """Counts inputs, and takes the time of each."""

    def __init__(self, inputs: int, parse: Callable[[bytes], None], *, every: float = 10.0) -> None:
        self.inputs = inputs
        self.count = 0
        self.slowest = (0.0, b"")
        self._parse = parse
        self._began = self._said = time.monotonic()
        self._resident = _resident_mib()
        self._every = every

    def __call__(self, data: bytes) -> None:
        """Parse one input."""
        began = time.process_time()
        try:
            self._parse(data)
        except Exception:
            sys.stderr.write(f"input: {data.hex()}\n")
            raise
        took = time.process_time() - began
        if took > self.slowest[0]:
            took = min(took, self._again(data))
            self.slowest = max(self.slowest, (took, data))
        if took > LONGEST:
            raise TimeoutError(f"{took * 1e3:.1f} ms of processor time for an input of {len(data)} bytes: {data.hex()}")
        self.count += 1
        if self.count == self.inputs:
            sys.stderr.write(f"{self.report()}\n")
        if self.count % LOOK_EVERY == 0 and (grown := _resident_mib() - self._resident) > GROWTH_MB:
            raise MemoryError(f"the process grew by {grown} MiB in {self.count} inputs, {GROWTH_MB} are allowed")
        if self.count % 50_000 == 0 and time.monotonic() - self._said > self._every:
            self._said = time.monotonic()
            sys.stderr.write(f"{self.report()}\n")

    def _again(self, data: bytes, times: int = 3) -> float:
        """Return the least that an input takes: on a busy machine even processor time is not exact."""
        least = 1e9
        for _ in range(times):
            began = time.process_time()
            self._parse(data)
            least = min(least, time.process_time() - began)
        return least

    def report(self) -> str:
        """Return what came of it so far, in one line."""
        seconds = time.monotonic() - self._began
        took, data = self.slowest
        return (
            f"{self.count} inputs in {seconds:.0f} s, slowest {took * 1e3:.2f} ms of processor time "
            f"({len(data)} bytes), at most {_resident_mib()} MiB resident"
        )


def _resident_mib() -> int:
    """Return the most memory that was ever resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many inputs to try (default: 1000000)")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (default: 1)")
    parser.add_argument("--plain", action="store_true", help="do not use atheris")
    parser.add_argument("--keep", action="store_true", help="keep some of what was found in corpus.txt")
    parser.add_argument("--max-length", type=int, default=512, help="bytes of an input at most (default: 512)")
    options = parser.parse_args()
    atheris = None if options.plain else _atheris()
    if atheris is None:
        return _plain(options.inputs, options.seed)
    return _guided(atheris, options)


def _atheris() -> ModuleType | None:
    try:
        import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore] # by hand only, no dependency
    except ImportError:
        sys.stderr.write("atheris cannot be imported: a plain mutator is used (pip install atheris)\n")
        return None
    module: ModuleType = atheris
    return module


def _guided(atheris: ModuleType, options: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="allreduced-fuzz-"))
    child = os.fork()  # for libFuzzer never returns
    if child == 0:
        return _fuzz(atheris, options, folder)
    _, status = os.waitpid(child, 0)
    if options.keep:
        keep([*corpus(), *_smallest(folder)])
    shutil.rmtree(folder)
    return os.waitstatus_to_exitcode(status)


def _fuzz(atheris: ModuleType, options: argparse.Namespace, folder: Path) -> int:
    with atheris.instrument_imports(include=["allreduced"]):
        from allreduced.protocol import codec

        # The readers of messages are made while their modules are imported, by exec: instrument them as they are made.
        source = codec._Source
        make = source._function
        source._function = lambda self, parameters, lines: atheris.instrument_func(make(self, parameters, lines))  # type: ignore[method-assign]
        from tests.fuzz.parsers import parse

    watch = Watch(options.inputs, parse)
    for at, data in enumerate(corpus()):
        (folder / f"seed{at}").write_bytes(data)
    arguments = [
        sys.argv[0],
        str(folder),
        f"-runs={options.inputs}",
        f"-seed={options.seed}",
        f"-max_len={options.max_length}",
        f"-rss_limit_mb={MEMORY_MB}",
        "-timeout=10",
        "-print_final_stats=1",
        "-verbosity=0",
        f"-artifact_prefix={tempfile.gettempdir()}/allreduced-fault-",
    ]
    atheris.Setup(arguments, watch, enable_python_coverage=True)
    atheris.Fuzz()
    return 0


def _smallest(folder: Path, most: int = 110, longest: int = 100) -> list[bytes]:
    """Return some of what covered something new: short, of every reader."""
    found = sorted((path.read_bytes() for path in folder.iterdir() if not path.name.startswith("seed")), key=len)
    by_reader: dict[int, list[bytes]] = {}
    for data in found:
        if data and len(data) <= longest:
            by_reader.setdefault(data[0] % 11, []).append(data)
    return [data for some in by_reader.values() for data in some[: most // 11]]


def _plain(inputs: int, seed: int) -> int:
    from tests.fuzz.parsers import parse

    rng = random.Random(seed)
    pool = corpus()
    watch = Watch(inputs, parse)
    while watch.count < inputs:
        watch(mutate(rng, pool))
    return 0


def mutate(rng: random.Random, pool: list[bytes]) -> bytes:
    """Return one of the inputs with a few changes: bytes, lengths, pieces cut out, doubled, or put in from another."""
    data = bytearray(rng.choice(pool))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] = rng.getrandbits(8)
        elif kind == 1 and at < len(data):
            data[at] = (data[at] + rng.choice((-1, 1, 16, -16))) & 0xFF
        elif kind == 2:
            del data[at : at + rng.randint(1, 8)]
        elif kind == 3:
            data[at:at] = rng.choice(WORDS)
        elif kind == 4:
            other = rng.choice(pool)
            start = rng.randrange(len(other) + 1)
            data[at:at] = other[start : start + rng.randint(1, 32)]
        else:
            data[at:at] = data[at : at + rng.randint(1, 16)] * rng.choice((1, 2, 50))
    if rng.random() < 0.01:
        data += bytes([rng.getrandbits(8)]) * rng.randrange(LARGE)
    return bytes(data)


WORDS = [
    b"\x90", b"\x80", b"\xc0", b"\xc1", b"\xc2", b"\xc3", b"\xff", b"\xa0", b"\xc4\x00", b"\xc7\x00\x00",
    b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xde\xff\xff", b"\xdf\x00\x01\x00\x00", b"\xc6\x7f\xff\xff\xff",
    b"\xdb\x00\x10\x00\x00", b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7, b"\xd9\x04\xed\xa0\x80\x41", b"\x91" * 64, b"\xcd\xff\xff",
]  # fmt: skip
"""Beginnings of values in msgpack: long arrays and texts, extremes, infinity, no number, nests, broken text."""


if __name__ == "__main__":
    sys.exit(main())
