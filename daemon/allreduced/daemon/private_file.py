"""Files with a secret or a key: who else may have a look at them, if they are to be used."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from allreduced.core.errors import AuthenticationError

_OTHERS = stat.S_IRWXO
_GROUP = stat.S_IRWXG
_ROOT = 0


def reading_hint(path: str | Path, error: OSError) -> str:
    """Return what lets this process read a file that it failed to read; empty where it is no matter of permissions."""
    if not isinstance(error, PermissionError):
        return ""
    user = _user()
    folder = closed_folder(path)
    if folder is not None:
        return f"{user} may not enter {folder}: put the file where it may, such as /etc/allreduced"
    return f"give it to the user of the agent: chown {user} {path}"


def closed_folder(path: str | Path) -> Path | None:
    """Return the first folder on the way to ``path`` that this process may not enter; None where it may enter all."""
    for folder in reversed(Path(path).absolute().parents):
        if not os.access(folder, os.X_OK, effective_ids=True):
            return folder
    return None


def _user() -> str:
    """Return the name of the user that this process runs as, or its number where it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def too_open(mode: int, owner: int) -> str:
    """Return who may use a file that should not, in words; empty where nobody may. Pure.

    Nobody but its owner may use it. A file of root's may also be read, and only read, by its group: root has chosen
    that group for the agent, and so do volumes of Kubernetes with ``fsGroup``. Of a file of any other owner the group
    is the one that all files of that user have, and nobody's choice.
    """
    if mode & _OTHERS:
        return "others"
    return "its group" if mode & (_GROUP & ~stat.S_IRGRP if owner == _ROOT else _GROUP) else ""


def check_private(what: str, path: object, descriptor: int) -> None:
    """Check that an open file is private. ``what``: what it is, for the error.

    :raises AuthenticationError: it is not.
    """
    found = os.fstat(descriptor)
    mode = stat.S_IMODE(found.st_mode)
    who = too_open(mode, found.st_uid)
    if who:
        mended = "640" if found.st_uid == _ROOT != os.geteuid() else "600"
        raise AuthenticationError(f"{who} may use {what} {path} (mode {mode:03o})", hint=f"chmod {mended} {path}")
