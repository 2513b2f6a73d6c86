"""Boots the guest, and runs one command in it."""

from __future__ import annotations

import os
import re
import selectors
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.rdma.guest.kernel import Kernel
from tests.rdma.guest.unavailable import Unavailable

BOOT_SECONDS: Final = 300.0
"""A boot takes about 5 s on a quiet machine, and minutes on one that is very busy."""

END_SECONDS: Final = 20.0
"""What the guest may take beyond the command's own limit."""

PROCESSORS: Final = 2
"""With one, processes that poll wait milliseconds for each other."""

LEAST_MEMORY, MOST_MEMORY = 1536, 4096
"""MiB."""

_UP: Final = b"GUEST-UP"
_STATUS: Final = re.compile(rb"(.*)GUEST-STATUS (\d+)")
_FAILED: Final = re.compile(rb"GUEST-FAILED (.*)")

DEVICE: Final = Path(__file__).with_name("device.sh")


@dataclass(frozen=True)
class Machine:
    """What a guest is made of. ``path``: a folder for the Python path of commands, which holds Debian's pyverbs."""

    kernel: Kernel
    initramfs: Path
    path: Path


@dataclass(frozen=True)
class Command:
    """What to run in the guest, as root, in ``folder``; ``seconds`` bounds it."""

    words: Sequence[str]
    folder: Path
    seconds: float
    environment: Mapping[str, str]
    nodes: int = 4
    """Addresses of the device; 0: no device is made."""

    def script(self, path: Path) -> str:
        """Return it as a script of the shell."""
        variables = {
            "HOME": "/root",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL": "C.UTF-8",
            "TERM": "dumb",
            "PYTHONPATH": str(path),
            "GUEST_OUT": "/run/guest",
            "NODES": str(self.nodes),
            **self.environment,
        }
        lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        if self.nodes:
            lines.append(f". {shlex.quote(str(DEVICE))}")
        lines.append(f"cd {shlex.quote(str(self.folder))}")
        lines.append(f"exec timeout -k 5 {self.seconds:g} {shlex.join(self.words)}")
        return "\n".join([*lines, ""])


def run(machine: Machine, command: Command, out: Path, write: Callable[[bytes], object]) -> int:
    """Boot, run the command, and return its exit status: 124 where it took too long, 125 where the guest died.

    ``out``: an empty folder that the guest sees as ``$GUEST_OUT``. ``write`` gets the command's output as it comes.

    :raises Unavailable: the guest does not come up.
    """
    (out / "command").write_text(command.script(machine.path))
    arguments = _arguments(machine, out, _memory())
    guest = subprocess.Popen(
        # The guest ends with this process, also where this one is killed.
        ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        return Console(guest, write).follow(command.seconds)
    finally:
        guest.kill()
        guest.wait()
        assert guest.stdout is not None
        guest.stdout.close()


class Console:
    """The serial line of a guest, which tells how far it is and carries the output of the command."""

    def __init__(self, guest: subprocess.Popen[bytes], write: Callable[[bytes], object]) -> None:
        self._guest = guest
        self._write = write
        self._partial = b""
        self._early: list[bytes] = []
        self._up = False
        self._status: int | None = None

    def follow(self, seconds: float) -> int:
        """Read until the guest is over; return the status of its command.

        :raises Unavailable: it does not come up.
        """
        assert self._guest.stdout is not None
        until = time.monotonic() + BOOT_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._guest.stdout, selectors.EVENT_READ)
            while self._status is None:
                left = until - time.monotonic()
                if left <= 0:
                    if self._up:
                        return 124
                    raise Unavailable(f"the guest was not up within {BOOT_SECONDS:g} s: {self._last()}")
                if not selector.select(left):
                    continue
                data = os.read(self._guest.stdout.fileno(), 65536)
                if not data:
                    if self._up:
                        return 125
                    raise Unavailable(f"the guest did not come up: {self._last()}")
                was_up = self._up
                self._take(data.replace(b"\r", b""))
                if self._up and not was_up:
                    until = time.monotonic() + seconds + END_SECONDS
        return self._status

    def _take(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            if failed := _FAILED.search(line):
                raise Unavailable(f"the guest did not come up: {failed[1].decode()}; {self._last()}")
            if not self._up:
                self._early.append(line)
                self._up = line.endswith(_UP)
            elif status := _STATUS.fullmatch(line):
                self._say(status[1])
                self._status = int(status[2])
                return
            else:
                self._say(line + b"\n")
        # Dots of a test runner come without an end of line; where the status may have begun, the rest is waited for.
        if self._up and b"G" not in self._partial:
            self._say(self._partial)
            self._partial = b""

    def _say(self, data: bytes) -> None:
        if data:
            self._write(data)

    def _last(self) -> str:
        return " / ".join(line.decode(errors="replace") for line in (*self._early, self._partial)[-4:])


def _arguments(machine: Machine, out: Path, memory: int) -> list[str]:
    kernel_arguments = (
        "console=ttyS0 quiet panic=-1 mitigations=off nokaslr random.trust_cpu=on rdinit=/init "
        # A busy machine holds the guest up, which must not look to it like a broken timer, or like a clock to be given
        # up for one that costs a trip out of the emulation each time it is read.
        "no_timer_check clocksource.max_cswd_read_retries=20 "
        f"guest.modules={machine.kernel.modules.resolve()}"
    )
    return [
        # Nested virtualization often is none: emulation works everywhere.
        *("-accel", "tcg,thread=multi", "-cpu", "Nehalem", "-machine", "q35"),
        *("-smp", str(PROCESSORS), "-m", str(memory)),
        *("-nodefaults", "-no-reboot", "-display", "none", "-monitor", "none", "-serial", "stdio"),
        *("-kernel", str(machine.kernel.image), "-initrd", str(machine.initramfs), "-append", kernel_arguments),
        *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
        *("-virtfs", f"local,path={out.resolve()},mount_tag=out,security_model=none"),
    ]


def _memory() -> int:
    """Return the guest's memory in MiB: half of what is available, within bounds.

    :raises Unavailable: there is too little.
    """
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    available = int(found[1]) // 1024 if found else LEAST_MEMORY
    if available < LEAST_MEMORY:
        raise Unavailable(f"the guest needs {LEAST_MEMORY} MiB of memory, and {available} MiB are available")
    return min(MOST_MEMORY, max(LEAST_MEMORY, available // 2))
