"""Root file systems of Debian, and Debian's packages for the machine itself: what tests with containers are made of."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
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


def _apt(*arguments: str) -> None:
    done = subprocess.run(
        ["apt-get", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise NotPermitted(f"apt-get {arguments[0]} fails: {_last(done.stderr)}")


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _last(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-3:])
