"""A machine that a real systemd runs: PID 1 in namespaces of its own, over a throw-away copy of a file system."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.debian import NotPermitted
from tests.systemd.root import REPOSITORY, Root

BOUND = 90.0
"""Seconds in which everything must have happened."""

_PAUSE = 0.05


class Refused(Exception):
    """There can be no such machine here; the reason is for people."""


class Machine:
    """A running machine. ``shared``: a folder that it has as ``/opt/shared``."""

    def __init__(self, init: int, shared: Path) -> None:
        self._init = init
        self.shared = shared

    def run(self, *command: str, check: bool = True, timeout: float = BOUND) -> str:
        """Run a command there, and return what it wrote (both streams)."""
        done = subprocess.run(
            self.prefix(*command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}")
        return done.stdout

    def status(self, *command: str) -> int:
        """Run a command there and return its exit status."""
        return subprocess.run(
            self.prefix(*command), stdin=subprocess.DEVNULL, capture_output=True, timeout=BOUND, check=False
        ).returncode

    def prefix(self, *command: str) -> list[str]:
        """Return the command that runs ``command`` there."""
        return ["nsenter", "-t", str(self._init), "-a", "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", *command]

    def python(self, script: Path, *arguments: str, user: str = "allreduced") -> subprocess.Popen[str]:
        """Start a script of the shared folder there, as a user; its standard output can be read."""
        group = "nogroup" if user == "nobody" else user
        change = ("setpriv", "--pdeathsig", "KILL", f"--reuid={user}", f"--regid={group}", "--clear-groups")
        return subprocess.Popen(
            self.prefix(*change, "/opt/allreduced/bin/python", f"/opt/shared/{script.name}", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def show(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "--value", "-p", name, unit).strip()

    def until(self, unit: str, name: str, *wanted: str) -> str:
        """Wait until a property of a unit begins with one of these texts, and return it."""
        end = time.monotonic() + BOUND
        while True:
            value = self.show(unit, name)
            if value.startswith(wanted):  # not only contains: "inactive" is not "active"
                return value
            if time.monotonic() > end:
                raise AssertionError(f"{name} of {unit} is {value!r}, not {wanted}\n{self.journal(unit)}")
            time.sleep(_PAUSE)

    def journal(self, unit: str) -> str:
        """Return the lines of a unit so far."""
        self.run("journalctl", "--sync")
        return self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit)


@contextlib.contextmanager
def machine(root_of: Callable[[Path], Root]) -> Iterator[Machine]:
    """Boot a machine, and end it. ``root_of``: makes what it consists of, with an empty folder for its own.

    :raises Refused: it cannot be had here.
    """
    if os.geteuid():
        raise Refused("only root may make namespaces and mount")
    for tool in ("unshare", "nsenter", "pivot_root", "setpriv"):
        if shutil.which(tool) is None:
            raise Refused(f"{tool} is not installed")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="allreduced-systemd-", dir="/tmp")))
        for name in ("root", "made", "shared"):
            (folder / name).mkdir()
        folder.chmod(0o755)
        (folder / "shared").chmod(0o777)
        try:
            root = root_of(folder / "made")
        except NotPermitted as reason:
            raise Refused(str(reason)) from reason
        cgroup = stack.enter_context(_cgroup())
        log = stack.enter_context((folder / "boot.log").open("w+"))
        unshared = subprocess.Popen(
            [
                *("sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(cgroup)),
                *("setpriv", "--pdeathsig", "KILL"),  # with the tests, however these end
                *("unshare", "--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup", "--fork", "--kill-child"),
                str(Path(__file__).with_name("boot.sh")),
                *(str(folder / "root"), str(root.files), str(root.python or ""), str(root.packages)),
                *(str(REPOSITORY / "configs" / "systemd"), str(folder / "shared")),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        stack.callback(_end, unshared)
        yield Machine(_booted(unshared, Path(log.name)), folder / "shared")


@contextlib.contextmanager
def _cgroup() -> Iterator[Path]:
    """Return a new group of the unified hierarchy, which is emptied in the end."""
    for root in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
        if (root / "cgroup.procs").exists() and (root / "cgroup.controllers").exists():
            break
    else:
        raise Refused("there is no cgroup2 hierarchy")
    group = root / f"allreduced-systemd-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise Refused(f"no cgroup can be made: {error.strerror}") from error
    try:
        yield group
    finally:
        end = time.monotonic() + BOUND
        for at in [*sorted(group.rglob("*/"), key=lambda path: -len(path.parts)), group]:
            while at.is_dir():
                try:
                    at.rmdir()
                except OSError:  # its processes are on their way out
                    if time.monotonic() > end:
                        raise
                    time.sleep(_PAUSE)


def _booted(unshared: subprocess.Popen[bytes], log: Path) -> int:
    """Wait until systemd runs; return its pid as it is seen from here."""
    end = time.monotonic() + BOUND
    children = Path(f"/proc/{unshared.pid}/task/{unshared.pid}/children")
    state = ""
    while time.monotonic() < end:
        if unshared.poll() is not None:
            raise Refused(f"namespaces, mounts or overlay are not permitted: {log.read_text().strip()[-300:]}")
        init = children.read_text().split()
        if init and Path(f"/proc/{init[0]}/comm").read_text().strip() == "systemd":
            asked = Machine(int(init[0]), log.parent).run("systemctl", "is-system-running", check=False)
            state = asked.strip()
            if state in ("running", "degraded"):
                return int(init[0])
        time.sleep(_PAUSE)
    raise Refused(f"systemd did not come up: {state} {log.read_text().strip()[-300:]}")


def _end(unshared: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        unshared.send_signal(signal.SIGTERM)  # with it, PID 1 of the namespace, and so all of it
    unshared.kill()
    unshared.wait(BOUND)
