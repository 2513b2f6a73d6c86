"""The inputs that fuzzing starts from, one a line: one of each message and frame, and some that runs found."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).with_name("corpus.txt")


def corpus() -> list[bytes]:
    """Return the kept inputs."""
    return [bytes.fromhex(line) for line in FILE.read_text().split()]


def keep(inputs: list[bytes]) -> None:
    """Keep these inputs, the short ones first."""
    FILE.write_text("".join(f"{one.hex()}\n" for one in sorted(set(inputs), key=lambda one: (len(one), one))))
