"""Root file systems of Debian, and Debian's packages for the machine itself: what tests with containers are made of."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
INSTALL_SECONDS = 600.0


class NotPermitted(Exception):
    """This machine, or this user, cannot do what is needed; the text is a reason to skip a test."""


def need(tools: Mapping[str, Sequence[str]]) -> None:
    """Install what is missing. ``tools``: the packages that bring each command.

    :raises NotPermitted: a command is missing and cannot be installed.
    """
    missing = [tool for tool in tools if shutil.which(tool, path=_path()) is None]
    if not missing:
        return
    known = install({package for tool in missing for package in tools[tool]}, what=", ".join(missing))
    still = [tool for tool in missing if shutil.which(tool, path=_path()) is None]
    if still:
        raise NotPermitted(f"{', '.join(still)} is missing, and {' '.join(known) or 'no package'} does not bring it")


def install(packages: Collection[str], *, what: str) -> list[str]:
    """Install those of the packages that this machine's Debian has, and return them. ``what``: what lacks, for errors.

    :raises NotPermitted: they cannot be installed.
    """
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NotPermitted(f"{what} is missing, and only root on Debian installs it")
    known = [package for package in sorted(packages) if _known(package)]
    if len(known) < len(packages):
        _apt("update", "-q")
        known = [package for package in sorted(packages) if _known(package)]
    _apt("install", "-q", "-y", "--no-install-recommends", *known)
    return known


def unpack(packages: Sequence[str], folder: Path) -> None:
    """Fetch those of the packages that this machine's Debian has and unpack them in ``folder``; nothing is installed.

    A folder that is there already stays as it is.

    :raises NotPermitted: they cannot be fetched.
    """
    if folder.exists():
        return
    for tool in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise NotPermitted(f"{' and '.join(packages)} are fetched on Debian only: there is no {tool}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as name:
        fetched, whole = Path(name), Path(name) / "whole"
        try:
            _download(packages, fetched)
        except NotPermitted:  # the lists of packages are missing or old
            _apt("update", "-q")
            _download(packages, fetched)
        for file in fetched.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", file, whole], check=True, timeout=INSTALL_SECONDS)
        try:
            whole.rename(folder)
        except OSError:
            if not folder.exists():  # else another run was faster
                raise


def make_tars(
    layers: Sequence[tuple[Path, Sequence[str]]],
    *,
    suite: str = SUITE,
    then: Sequence[str] = (),
    makes: Sequence[Path] = (),
) -> None:
    """Write a root file system as a tar for each layer: its packages, on top of those of the layers before.

    ``then``: shell commands after the last layer, with the root as ``$1``, which write the files ``makes``.
    What is all there already stays as it is.

    :raises NotPermitted: there are no packages to be had, or this user must not make root file systems.
    """
    if all(path.exists() for path in (*(tar for tar, _ in layers), *makes)):
        return
    need({"mmdebstrap": ("mmdebstrap",)})
    (first, packages), *more = layers
    hooks = [_pack(first)]
    for tar, further in more:
        install = shlex.join(["apt-get", "install", "-q", "-y", "--no-install-recommends", *further])
        hooks += [f'chroot "$1" env DEBIAN_FRONTEND=noninteractive {install}', 'chroot "$1" apt-get clean', _pack(tar)]
    command = [
        *("mmdebstrap", "--variant=minbase", "--format=null", f"--include={','.join(packages)}"),
        "--dpkgopt=force-unsafe-io",  # nobody needs it after a power cut
        # Manuals and translations are most of the files, and none of the use.
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale", "info")),
        *(f"--customize-hook={hook}" for hook in (*hooks, *then)),
        *(suite, "-", f"deb {MIRROR} {suite} main"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    if done.returncode != 0:
        raise NotPermitted(f"mmdebstrap cannot make a root file system here: {_last(done.stderr)}")


def _pack(tar: Path) -> str:
    # Written under another name first, so that what is there under its own is whole.
    part = shlex.quote(f"{tar}.part")
    return (
        f'tar -C "$1" --one-file-system --exclude=./var/cache/apt/archives/*.deb -cf {part} .'
        f" && mv {part} {shlex.quote(str(tar))}"
    )


def _known(package: str) -> bool:
    done = subprocess.run(["apt-cache", "show", package], capture_output=True, check=False)
    return done.returncode == 0


def _download(packages: Sequence[str], folder: Path) -> None:
    known = [package for package in packages if _known(package)]
    if not known:
        raise NotPermitted(f"this machine's Debian has no {' and no '.join(packages)}")
    _apt("download", *known, cwd=folder)


def _apt(*arguments: str, cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(
            ["apt-get", *arguments],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            cwd=cwd,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NotPermitted(f"apt-get {arguments[0]} does not end within {INSTALL_SECONDS:.0f} s") from error
    if done.returncode != 0:
        raise NotPermitted(f"apt-get {arguments[0]} fails: {_last(done.stderr)}")


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _last(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-3:])
