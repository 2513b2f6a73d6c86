"""The first file system of the guest: busybox, the first modules and ``init.sh``, as an archive for the kernel."""

from __future__ import annotations

import gzip
import shutil
import stat
from pathlib import Path
from typing import Final

from tests.rdma.guest.kernel import FIRST_MODULES, Kernel, read_module
from tests.rdma.guest.unavailable import Unavailable

INIT: Final = Path(__file__).with_name("init.sh")
_FOLDERS: Final = ("bin", "modules", "proc", "sys", "dev", "lower", "layer", "root")


def build(kernel: Kernel) -> bytes:
    """Return the compressed archive.

    :raises Unavailable: a part of it is not there.
    """
    busybox = shutil.which("busybox")
    if busybox is None:
        raise Unavailable("busybox is not there")
    archive = Archive()
    for folder in _FOLDERS:
        archive.folder(folder)
    archive.file("bin/busybox", Path(busybox).read_bytes())
    modules = kernel.with_dependencies(FIRST_MODULES)
    for place, path in enumerate(modules):
        archive.file(f"modules/{place:02}.ko", read_module(path))
    archive.file("init", INIT.read_bytes())
    return gzip.compress(archive.finished(), compresslevel=1, mtime=0)


class Archive:
    """A cpio archive in the ``newc`` form (Linux: Documentation/driver-api/early-userspace/buffer-format.rst)."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._entries = 0

    def folder(self, name: str) -> None:
        """Add an empty folder."""
        self._add(name, stat.S_IFDIR | 0o755, b"")

    def file(self, name: str, data: bytes) -> None:
        """Add an executable file."""
        self._add(name, stat.S_IFREG | 0o755, data)

    def finished(self) -> bytes:
        """Return the archive; nothing can be added any more."""
        self._add("TRAILER!!!", 0, b"")
        return b"".join(self._parts)

    def _add(self, name: str, mode: int, data: bytes) -> None:
        self._entries += 1
        raw = name.encode() + b"\0"
        # inode, mode, uid, gid, links, mtime, size, device (2), special device (2), size of the name, checksum
        fields = (self._entries, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(raw), 0)
        header = b"070701" + b"".join(b"%08x" % field for field in fields)
        self._parts += [_padded(header + raw), _padded(data)]


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
