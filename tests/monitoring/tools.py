"""The programs ``prometheus`` and ``promtool``: the machine's own, or unpacked from Debian's packages."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.debian import NotPermitted, unpack

CACHE = Path(__file__).parents[2] / "build" / "prometheus"
"""Kept from run to run; `make clean` removes it."""

SECONDS = 120.0


@dataclass(frozen=True)
class Tools:
    """Where the programs are."""

    prometheus: Path
    promtool: Path

    def check(self, *arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
        """Run ``promtool ARGUMENTS``; return how it ended and what it wrote."""
        done = subprocess.run(
            [self.promtool, *arguments], input=stdin, capture_output=True, timeout=SECONDS, check=False
        )
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def find_tools() -> Tools:
    """Return the tools of PATH where both are there, else those of Debian's packages, which are fetched once.

    :raises NotPermitted: there are none, and they cannot be fetched.
    """
    own = [shutil.which(name) for name in ("prometheus", "promtool")]
    if not all(own):
        unpack(("prometheus", "promtool"), CACHE)  # the second one since Debian 13
        own = [str(CACHE / "usr" / "bin" / name) for name in ("prometheus", "promtool")]
    tools = Tools(*(Path(path) for path in own if path is not None))
    for program in (tools.prometheus, tools.promtool):
        try:
            done = subprocess.run([program, "--version"], capture_output=True, timeout=SECONDS, check=False)
        except OSError as error:  # of another architecture, or without its library
            raise NotPermitted(f"{program.name} does not run here: {error}") from error
        if done.returncode != 0:
            raise NotPermitted(f"{program.name} --version ends with status {done.returncode}")
    return tools
