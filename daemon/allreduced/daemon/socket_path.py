"""Where the agent's Unix socket is: checks before binding, binding, and taking it away again."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from allreduced.core.addresses import parse_socket
from allreduced.core.errors import ConfigError

_SETTING = "agent.socket"
_OTHER_PATH = "or choose another path for this agent"

BACKLOG = 256
"""Connections that wait in the kernel's queue. Clients wait for room where it is full; where strangers fill it, a
longer one would only be a longer wait."""

_LOCK_TRIES = 100
"""Agents that may start and be ready in between, one after the other, before this one gives up."""


class BoundSocket:
    """A bound listening socket and the file behind it."""

    def __init__(self, sock: socket.socket, name: str, file: tuple[int, int] | None) -> None:
        self.sock = sock
        self.name = name
        self._file = file

    def use_mode(self, mode: int) -> None:
        """Give the file these permissions, if it is one that was bound here and is there still.

        :raises OSError: the system refuses.
        """
        if self._file is not None and _identity(os.lstat(self.name)) == self._file:
            Path(self.name).chmod(mode)

    def close(self) -> None:
        """Remove the file, unless another agent put its own there, and stop listening. Idempotent."""
        file, self._file = self._file, None
        try:
            # While it listens nobody takes the file for a dead one's and puts another in its place.
            if file is not None and _identity(os.lstat(self.name)) == file:
                Path(self.name).unlink()
        except OSError:
            pass  # gone, or its folder is: nothing is left behind, which is all that is wanted
        finally:
            self.sock.close()


def bind_socket(name: str, *, mode: int = 0o600, group: int = -1, backlog: int = BACKLOG) -> BoundSocket:
    """Bind the ``socket`` setting and listen. A missing last folder of the path is made, a dead socket replaced.

    ``mode`` and ``group`` (a gid, -1 to leave it) are those of the file. Does not block.

    :raises ConfigError: the path is too long; something that is not ours or not a socket is there; a live agent
        answers there; or the system refuses. The message says which.
    """
    address = parse_socket(name, path=_SETTING)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if address.abstract:
            try:
                sock.bind(address.sockaddr)
            except OSError as error:
                raise _bind_error(name, error) from error
            sock.listen(backlog)
            return BoundSocket(sock, name, None)
        _is_dead_socket(name)  # says what is wrong also where this user could not make a lock
        with _start_lock(name):
            if _is_dead_socket(name):
                with suppress(FileNotFoundError):
                    Path(name).unlink()
            try:
                sock.bind(address.sockaddr)
                _give(name, group)
                Path(name).chmod(mode)  # before listen: nobody can connect in between
                file = _identity(os.lstat(name))
                sock.listen(backlog)
            except OSError as error:
                raise _bind_error(name, error) from error
        return BoundSocket(sock, name, file)
    except BaseException:
        sock.close()
        raise


def check_place(name: str) -> None:
    """Check that a socket could be made at the place ``name``. Makes nothing.

    A socket that is there already is well: of this agent, of one that was killed, or of the service manager.

    :raises ConfigError: something else is there, or this user could not make one in that folder.
    """
    if parse_socket(name, path=_SETTING).abstract:
        return
    try:
        if not stat.S_ISSOCK(os.lstat(name).st_mode):
            raise _no_socket(name)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _bind_error(name, error) from error
    else:
        return
    folder = Path(name).parent
    there = os.access(folder, os.F_OK, effective_ids=True)
    made_in = folder if there else folder.parent
    if not os.access(made_in, os.F_OK, effective_ids=True):
        raise _bind_error(name, OSError(errno.ENOENT, os.strerror(errno.ENOENT)))
    if not os.access(made_in, os.W_OK | os.X_OK, effective_ids=True):
        refused = OSError(errno.EACCES, os.strerror(errno.EACCES))
        raise _lock_error(_lock_of(name), name, refused) if there else _bind_error(name, refused)


def _no_socket(name: str) -> ConfigError:
    return ConfigError(f"{name} exists and is not a socket", path=_SETTING, hint="move it away or choose another path")


def _lock_of(name: str) -> Path:
    return Path(name).with_name(f"{Path(name).name}.lock")


def _give(name: str, group: int) -> None:
    """Give the file to a group.

    :raises ConfigError: this user may not do that.
    """
    if group < 0:
        return
    try:
        os.chown(name, -1, group)
    except OSError as error:
        Path(name).unlink()
        raise ConfigError(
            f"the socket {name} cannot be given to the group with gid {group}: {error.strerror}",
            path="access.socket_group",
            hint="make the agent's user a member of that group, or choose one that it is in",
        ) from error


def _is_dead_socket(name: str) -> bool:
    """Tell whether a socket is at the path ``name`` that no agent serves any more; false where nothing is.

    :raises ConfigError: something is there that must not be touched, or a live agent answers there.
    """
    try:
        found = os.lstat(name)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _bind_error(name, error) from error
    if not stat.S_ISSOCK(found.st_mode):
        raise _no_socket(name)
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"the socket {name} belongs to uid {found.st_uid}, this agent runs as uid {os.geteuid()}",
            path=_SETTING,
            hint="choose another path, or let the owner remove it",
        )
    if _answers(name):
        raise ConfigError(
            f"an agent answers at {name} already",
            path=_SETTING,
            hint="stop it first, or choose another path for this one",
        )
    return True


def _answers(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        code = probe.connect_ex(name)
    # A full backlog (EAGAIN) and even a refused access (EACCES) mean that somebody is or may be there.
    return code not in (errno.ECONNREFUSED, errno.ENOENT)


@contextmanager
def _start_lock(name: str) -> Iterator[None]:
    """Keep two agents that start at once from removing each other's fresh socket.

    What is locked is a file of this user beside the socket that nobody else can open, made and taken away here. A lock
    of the folder itself could be held by whoever may read it.
    """
    path = _lock_of(name)
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
    except OSError as error:
        raise _bind_error(name, error) from error
    for _ in range(_LOCK_TRIES):
        descriptor = _open_lock(path, name)
        try:
            _lock(descriptor, path, name)
            if _is_at(path, _identity(os.fstat(descriptor))):
                break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the agent that held it took it away meanwhile
    else:
        raise ConfigError(
            f"other agents start at {name} all the time", path=_SETTING, hint=f"wait a moment, {_OTHER_PATH}"
        )
    try:
        yield
    finally:
        with suppress(OSError):  # it stays, as an empty file that the next agent locks
            path.unlink()
        os.close(descriptor)


def _open_lock(path: Path, name: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _lock_error(path, name, error) from error
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    raise ConfigError(
        f"no socket can be made at {name}: its lock {path} is there already, and is not a file of this agent's user",
        path=_SETTING,
        hint=f"remove it, {_OTHER_PATH}",
    )


def _lock(descriptor: int, path: Path, name: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"another agent starts at {name} right now", path=_SETTING, hint=f"wait a moment, {_OTHER_PATH}"
        ) from error
    except OSError as error:
        raise _lock_error(path, name, error) from error


def _lock_error(path: Path, name: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"no socket can be made at {name}: its lock {path} cannot be had: {error.strerror}",
        path=_SETTING,
        hint=f"check that this user may write in that folder and that nothing else has the lock's name, {_OTHER_PATH}",
    )


def _is_at(path: Path, identity: tuple[int, int]) -> bool:
    try:
        return _identity(os.lstat(path)) == identity
    except FileNotFoundError:
        return False


def _bind_error(name: str, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"an agent listens at {name} already", path=_SETTING, hint="stop it first, or choose another name"
        )
    return ConfigError(
        f"no socket can be made at {name}: {error.strerror}",
        path=_SETTING,
        hint="check that the folder exists and that this user may write there, or choose another path",
    )


def _identity(found: os.stat_result) -> tuple[int, int]:
    return (found.st_dev, found.st_ino)
