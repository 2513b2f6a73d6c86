"""What the guest needs of Debian's packages, and how it comes onto this machine."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.rdma.guest.unavailable import Unavailable

INSTALL_SECONDS: Final = 240.0
DOWNLOAD_SECONDS: Final = 120.0

NEEDED: Final = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "depmod": "kmod",
    "rdma": "iproute2",
    "ibv_devinfo": "ibverbs-utils",
    "ib_write_bw": "perftest",
    "/usr/lib/python3/dist-packages/pyverbs/__init__.py": "python3-pyverbs",
    "/usr/include/infiniband/verbs.h": "libibverbs-dev",
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",
}
"""What must be there, a command or a file, and the package that brings it."""

PYVERBS: Final = Path("/usr/lib/python3/dist-packages/pyverbs")
"""Debian's pyverbs. Only this package is shown to the Python of the tests, nothing else of Debian's."""

KERNEL: Final = "linux-image-amd64"
"""Depends on the kernel image of the day. The ``cloud`` flavour has no InfiniBand."""


def missing() -> list[str]:
    """Return the packages that are not installed."""
    return [package for what, package in NEEDED.items() if not _there(what)]


def install() -> None:
    """Install what is missing.

    :raises Unavailable: it is no x86-64 machine with apt, or apt refuses.
    """
    if platform.machine() != "x86_64":
        raise Unavailable(f"the guest runs Debian's x86-64 kernel, and this machine is {platform.machine()}")
    packages = missing()
    if packages:
        _apt_get(["update"], DOWNLOAD_SECONDS)
        _apt_get(["install", "--yes", "--no-install-recommends", *packages], INSTALL_SECONDS)
    if still := missing():
        raise Unavailable(f"not there although their packages are installed: {', '.join(still)}")


def fetch_kernel(into: Path) -> Path:
    """Download the package with the kernel image that ``linux-image-amd64`` stands for, and return it.

    :raises Unavailable: there is no such package, or it does not come.
    """
    answer = _run(["apt-cache", "depends", KERNEL], DOWNLOAD_SECONDS)
    found = re.search(r"Depends: (linux-image-\S+)", answer)
    if found is None:
        _apt_get(["update"], DOWNLOAD_SECONDS)
        found = re.search(r"Depends: (linux-image-\S+)", _run(["apt-cache", "depends", KERNEL], DOWNLOAD_SECONDS))
    if found is None:
        raise Unavailable(f"apt knows no {KERNEL}: this is no Debian")
    _run(["apt-get", "download", "--quiet", found[1]], DOWNLOAD_SECONDS, cwd=into)
    return next(into.glob(f"{found[1]}_*.deb"))


def _there(what: str) -> bool:
    if what.startswith("/"):
        return Path(what).exists()
    path = shutil.which(what, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    return path is not None


def _apt_get(arguments: list[str], seconds: float) -> None:
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    _run([*as_root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet", *arguments], seconds)


def _run(command: list[str], seconds: float, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError as error:
        raise Unavailable(f"{command[0]} is not there: the guest needs {', '.join(missing()) or KERNEL}") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"not within {seconds:g} s: {' '.join(command)}") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise Unavailable(f"{' '.join(command)}: {' / '.join(last)}")
    return done.stdout
