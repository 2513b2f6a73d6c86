"""Makes what a guest needs, once, and keeps it in a folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.rdma.guest import initramfs, kernel, packages
from tests.rdma.guest.machine import Machine
from tests.rdma.guest.unavailable import Unavailable

CHECK_SECONDS: Final = 60.0
_MARK: Final = "prepared.json"
_SOURCES: Final = ("init.sh", "initramfs.py", "kernel.py")


def prepared(folder: Path) -> Machine:
    """Return what a guest is made of; make it first where the folder does not hold it, or an older form of it.

    Installs Debian's packages where they are missing, and downloads the kernel (70 MB).

    :raises Unavailable: it cannot be had here.
    """
    packages.install()
    form = _form()
    mark = folder / _MARK
    if not mark.exists() or json.loads(mark.read_text()) != form:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        fetched = kernel.fetch(folder)
        (folder / "initramfs").write_bytes(initramfs.build(fetched))
        (folder / "path").mkdir()
        (folder / "path" / "pyverbs").symlink_to(packages.PYVERBS)
        mark.write_text(json.dumps(form))
    machine = Machine(kernel.unpacked(folder), folder / "initramfs", (folder / "path").resolve())
    _check_pyverbs(machine.path)
    return machine


def _form() -> dict[str, str]:
    here = Path(__file__).parent
    return {name: hashlib.sha256((here / name).read_bytes()).hexdigest() for name in _SOURCES}


def _check_pyverbs(path: Path) -> None:
    """See that the Python of the tests can load Debian's pyverbs, which is made for Debian's Python.

    :raises Unavailable: it cannot.
    """
    done = subprocess.run(
        [sys.executable, "-c", "import pyverbs.device"],
        env={"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=CHECK_SECONDS,
        check=False,
    )
    if done.returncode:
        version = ".".join(map(str, sys.version_info[:2]))
        why = done.stderr.strip().splitlines()[-1:]
        raise Unavailable(f"Debian's pyverbs does not load in Python {version} of {sys.prefix}: {' '.join(why)}")
