"""The guest's kernel: the image and the few modules that it uses, out of Debian's package."""

from __future__ import annotations

import lzma
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.rdma.guest import packages
from tests.rdma.guest.unavailable import Unavailable

UNPACK_SECONDS: Final = 120.0

FIRST_MODULES: Final = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
"""What the initramfs loads to see this machine's files; the rest is loaded from there."""

_WANTED: Final = re.compile(
    r"(boot/vmlinuz-[^/]+"
    r"|(usr/)?lib/modules/[^/]+/(modules\.[^/]+"
    r"|kernel/(arch|crypto|lib|net|drivers/virtio|drivers/infiniband/(core|sw)|fs/(9p|overlayfs|netfs|fscache))/.*"
    r"|kernel/drivers/net/(veth|dummy)\.ko.*))"
)


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel. ``modules``: the folder ``lib/modules`` with its modules."""

    image: Path
    modules: Path
    version: str

    def with_dependencies(self, names: Iterable[str]) -> list[Path]:
        """Return the module files to load for ``names``, each after those that it needs.

        :raises Unavailable: this kernel has no such module.
        """
        folder = self.modules / self.version
        needs = parse_dependencies((folder / "modules.dep").read_text())
        builtin = {_name(line) for line in (folder / "modules.builtin").read_text().split()}
        return [folder / path for path in load_order(names, needs, builtin)]


def parse_dependencies(text: str) -> dict[str, list[str]]:
    """Return what ``modules.dep`` says: for each module file those that it needs, the nearest first."""
    lines = (line.partition(":") for line in text.splitlines())
    return {path: needed.split() for path, _, needed in lines}


def load_order(names: Iterable[str], needs: dict[str, list[str]], builtin: set[str]) -> list[str]:
    """Return the files of the named modules and of all that they need, in an order in which they can be loaded.

    :raises Unavailable: there is no such module.
    """
    by_name = {_name(path): path for path in needs}
    order: list[str] = []
    for name in (name.replace("-", "_") for name in names):
        if name in builtin:
            continue
        if name not in by_name:
            raise Unavailable(f"the kernel has no module {name}")
        path = by_name[name]
        order += [file for file in (*reversed(needs[path]), path) if file not in order]
    return order


def read_module(path: Path) -> bytes:
    """Return a module as the kernel takes it, however the package compresses it.

    :raises Unavailable: in a way that Python's library does not know.
    """
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix != ".ko":
        raise Unavailable(f"{path.name} is compressed in a way that is not known here")
    return data


def fetch(into: Path) -> Kernel:
    """Download and unpack the kernel; return it.

    :raises Unavailable: it cannot be had.
    """
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        archive = packages.fetch_kernel(Path(scratch))
        _unpack(archive, into)
    return unpacked(into)


def unpacked(folder: Path) -> Kernel:
    """Return the kernel that :func:`fetch` put into the folder."""
    (image,) = (folder / "boot").glob("vmlinuz-*")
    version = image.name.removeprefix("vmlinuz-")
    return Kernel(image, folder / "lib" / "modules", version)


def _unpack(archive: Path, into: Path) -> None:
    with (
        subprocess.Popen(["dpkg", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE) as opened,
        tarfile.open(fileobj=opened.stdout, mode="r|") as members,
    ):
        for member in members:
            name = member.name.removeprefix("./")
            content = members.extractfile(member) if member.isfile() and _WANTED.fullmatch(name) else None
            if content is not None:
                target = into / name.removeprefix("usr/")
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(content, file)
    kernel = unpacked(into)
    subprocess.run(
        ["depmod", "--basedir", str(into), kernel.version],
        check=True,
        timeout=UNPACK_SECONDS,
        stderr=subprocess.DEVNULL,  # modules that were left out are named there
        env={"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"},
    )


def _name(path: str) -> str:
    return path.rpartition("/")[2].partition(".ko")[0].replace("-", "_")
