"""All settings of an agent: one typed schema, read in one place from a file, the environment and the command line.

``ALLREDUCED_<SECTION>_<KEY>`` overrides the file, the command line overrides both. ``ALLREDUCED_SECRET`` and
``ALLREDUCED_INSECURE`` are short names of the two settings of ``[security]`` that private agents need.
"""

from __future__ import annotations

import difflib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from allreduced.core.addresses import parse_address, parse_socket
from allreduced.core.errors import AuthenticationError, ConfigError
from allreduced.transports.registry import schemes

SYSTEM_SOCKET = "/run/allreduced/agent.sock"
DEFAULT_PORT = 4123

_SIZE = {"unit": "bytes"}
_UNITS: Final = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40} | {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}

Size: TypeAlias = Annotated[int, Meta(extra=_SIZE)]
"""A number of bytes, or text such as ``512MiB``."""
Count: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=1e9)]
_Given: TypeAlias = "tuple[object, str]"
"""A value, and the place where it was given: in the file, a variable, an option."""
Overrides: TypeAlias = "Mapping[str, object]"
"""``section.key`` to value; text is read as in an environment variable."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


class Agent(_Section, frozen=True):
    """Who and where this agent is."""

    node: Annotated[str, Meta(max_length=255, description="unique name of this node; empty: its host name")] = ""
    socket: Annotated[str, Meta(description="path, or @name, of the clients' socket; empty: the usual place")] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe line that is logged")
    ] = "warning"
    loop: Annotated[Literal["auto", "uvloop", "asyncio"], Meta(description="event loop; auto: asyncio's")] = "auto"


class StaticPeer(_Section, frozen=True):
    """One agent of a static list."""

    node: Annotated[str, Meta(min_length=1, max_length=255)]
    address: str


class Peers(_Section, frozen=True):
    """Where other agents are, and where this one is for them."""

    listen: Annotated[str, Meta(description="scheme://host:port to listen at; empty: only where there are peers")] = ""
    advertise: Annotated[
        str, Meta(description="scheme://host:port that others dial; empty: as listened at, or on the way to a peer")
    ] = ""
    static: Annotated[tuple[StaticPeer, ...], Meta(description="agents to dial, as node=address in a variable")] = ()
    flows: Annotated[int, Meta(ge=1, le=64, description="data connections per link")] = 2


class Security(_Section, frozen=True):
    """Who may be a peer."""

    secret: Annotated[str, Meta(description="shared by all agents")] = ""
    secret_file: Annotated[str, Meta(description="file with the secret, readable by its owner only")] = ""
    insecure: Annotated[bool, Meta(description="allow peers on other machines without a secret")] = False


class Engine(_Section, frozen=True):
    """How tensors are reduced."""

    threads: Annotated[int, Meta(ge=0, le=1024, description="reduction threads; 0: by the number of CPUs, up to 4")] = 0
    cpus: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=1 << 16)], ...], Meta(description="CPUs that they are bound to; empty: any")
    ] = ()
    nice: Annotated[int, Meta(ge=-20, le=19, description="their niceness")] = 0
    tile_bytes: Annotated[Size, Meta(description="unit of reducing and sending: a power of two, 256KiB to 4MiB")] = (
        1 << 20
    )
    window_tiles: Annotated[int, Meta(ge=1, le=1024, description="tiles that a peer may send ahead")] = 4


class Limits(_Section, frozen=True):
    """What clients may take; times in seconds."""

    arena_bytes: Annotated[Size, Meta(ge=0, description="all shared memory; 0: a share of the machine's")] = 0
    arena_bytes_per_client: Annotated[
        Size, Meta(ge=0, description="inputs of one client; 0: what all inputs may take")
    ] = 0
    arenas_per_client: Annotated[Count, Meta(description="pieces of shared memory that one client's inputs are in")] = (
        1024
    )
    clients: Annotated[Count, Meta(description="connected clients")] = 1024
    requests: Annotated[Count, Meta(description="requests in flight of one client")] = 4096
    operations: Annotated[Count, Meta(description="operations in flight of one group")] = 4096
    names: Annotated[Count, Meta(description="different names of operations in one group")] = 1 << 20
    inline: Annotated[Size, Meta(ge=1, le=64 << 10, description="bytes of a tensor that travels in messages")] = 8 << 10
    inline_bytes: Annotated[Size, Meta(ge=1, description="all small inputs in flight")] = 64 << 20
    lease_bytes: Annotated[Size, Meta(ge=1, description="results that one client may hold on to")] = 1 << 30
    leases: Annotated[Count, Meta(description="the same, in number")] = 4096
    outgoing_bytes: Annotated[Size, Meta(ge=1 << 20, description="what waits for a client that does not read")] = (
        64 << 20
    )
    outgoing_messages: Annotated[Count, Meta(description="the same, in number")] = 1 << 16
    hello_timeout: Annotated[Seconds, Meta(description="seconds in which a new connection must say who it is")] = 5.0
    pending_handshakes: Annotated[Count, Meta(description="connections of strangers at once")] = 64


class Failure(_Section, frozen=True):
    """When something is given up; in seconds. What else is needed is derived from ``failure_timeout``."""

    failure_timeout: Annotated[float, Meta(ge=0.2, le=3600, description="seconds until a silent peer is dead")] = 5.0
    deadline: Annotated[
        Seconds, Meta(description="seconds until an operation is given up, where neither call nor connect() says")
    ] = 300.0


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be configured."""

    agent: Agent = Agent()
    peers: Peers = Peers()
    security: Security = Security()
    engine: Engine = Engine()
    limits: Limits = Limits()
    failure: Failure = Failure()

    @property
    def heartbeat(self) -> float:
        """Seconds after which a quiet link gets a heartbeat: four in a row must be lost before the peer is dead."""
        return self.failure.failure_timeout / 4

    @property
    def drain_timeout(self) -> float:
        """Seconds that operations in flight may take to end when the agent is asked to stop."""
        return 2 * self.failure.failure_timeout

    def describe(self) -> str:
        """Return the settings as TOML; a secret is masked."""
        lines: list[str] = []
        for name in self.__struct_fields__:
            section = getattr(self, name)
            hints = get_type_hints(type(section), include_extras=True)
            tables: list[StaticPeer] = []
            lines += ["", f"[{name}]"] if lines else [f"[{name}]"]
            for key in section.__struct_fields__:
                value = getattr(section, key)
                if key == "secret" and value:
                    value = "********"
                if key == "static":
                    tables = list(value)
                else:
                    lines.append(f"{key} = {_toml(value, size=_is_size(hints[key]))}")
            for peer in tables:
                lines += ["", f"[[{name}.static]]", f"node = {_toml(peer.node)}", f"address = {_toml(peer.address)}"]
        return "\n".join(lines) + "\n"


_SECTIONS: Final[dict[str, type[_Section]]] = {
    "agent": Agent,
    "peers": Peers,
    "security": Security,
    "engine": Engine,
    "limits": Limits,
    "failure": Failure,
}
_SHORT: Final = {"ALLREDUCED_SECRET": ("security", "secret"), "ALLREDUCED_INSECURE": ("security", "insecure")}
_OF_OTHERS: Final = frozenset(
    f"ALLREDUCED_{name}"
    for name in ("AGENT", "JOB", "JOIN", "LOCAL_RANK", "LOCAL_SIZE", "NODE", "NODES", "RANK", "SIZE", "SOCKET")
)


def load(path: str | None, environ: Mapping[str, str], overrides: Overrides | None = None) -> Settings:
    """Read the file at ``path`` (None: no file) and return the settings.

    :raises ConfigError: the file cannot be read, or something in it, in a variable or in an override is wrong.
    """
    text = None
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"the configuration {path} cannot be read: {reason}", path=path) from error
    return parse(text, path or "", environ, overrides or {})


def parse(text: str | None, path: str, environ: Mapping[str, str], overrides: Overrides) -> Settings:
    """Return the settings that a TOML text, variables and overrides make; a pure function of them.

    Later ones win. ``path`` names the file in errors.

    :raises ConfigError: an unknown key or a bad value; ``path`` says where, the hint what is allowed.
    """
    given: dict[tuple[str, str], _Given] = {}
    _from_file(text, path, given)
    _from_environ(environ, given)
    _from_overrides(overrides, given)
    values: dict[str, dict[str, object]] = {name: {} for name in _SECTIONS}
    for (section, key), (value, _) in given.items():
        values[section][key] = value
    settings = Settings(**{name: _SECTIONS[name](**keys) for name, keys in values.items()})  # type: ignore[arg-type] # each value was converted to its field's type
    _check(settings, {f"{section}.{key}": where for (section, key), (_, where) in given.items()})
    return settings


def secret_bytes(settings: Settings) -> bytes:
    """Return the shared secret, out of its file if there is one; empty where there is none.

    :raises ConfigError: the file cannot be read, is empty, or both settings are given.
    :raises AuthenticationError: others may read the file.
    """
    security = settings.security
    if not security.secret_file:
        return security.secret.encode()
    where = "security.secret_file"
    if security.secret:
        raise ConfigError("both security.secret and security.secret_file are given", path=where, hint="give one")
    path = Path(security.secret_file)
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(4096).strip()
    except OSError as error:
        raise ConfigError(f"the secret file {path} cannot be read: {error.strerror}", path=where) from error
    if stat.S_IMODE(mode) & 0o077:
        raise AuthenticationError(
            f"the secret file {path} may be read by others (mode {stat.S_IMODE(mode):03o})", hint=f"chmod 600 {path}"
        )
    if not secret:
        raise ConfigError(f"the secret file {path} is empty", path=where)
    return secret


def default_socket(environ: Mapping[str, str]) -> str:
    """Return the usual place of the clients' socket: the user's runtime directory, else the system's."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return f"{runtime.rstrip('/')}/allreduced/agent.sock" if runtime.startswith("/") else SYSTEM_SOCKET


def parse_size(text: str) -> int:
    """Return the bytes that text such as ``512MiB``, ``8 KiB``, ``1.5GB`` or ``4096`` says.

    :raises ValueError: it is no size.
    """
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text.strip()[len(number) :].upper()
    if unit not in _UNITS:
        raise ValueError(f"{unit!r} is no unit")
    return int(float(number) * _UNITS[unit]) if "." in number else int(number) * _UNITS[unit]


# Reading


def _from_file(text: str | None, path: str, given: dict[tuple[str, str], _Given]) -> None:
    if text is None:
        return
    try:
        document = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}", path=path) from error
    for section, keys in document.items():
        where = f"{path or 'configuration'}: $.{section}"
        if section not in _SECTIONS:
            raise _unknown("section", section, list(_SECTIONS), where)
        if not isinstance(keys, dict):
            raise ConfigError(f"{where} is a section", path=where, hint=f"write [{section}] and keys under it")
        for key, value in keys.items():
            place = f"{where}.{key}"
            given[section, key] = _convert(section, key, value, place, strict=True), place


def _from_environ(environ: Mapping[str, str], given: dict[tuple[str, str], _Given]) -> None:
    # Short names first, so that the long ones win.
    found = [(name, *_SHORT[name]) for name in _SHORT if environ.get(name)]
    for name in sorted(environ):
        for section in _SECTIONS:
            prefix = f"ALLREDUCED_{section.upper()}_"
            if name.startswith(prefix):
                found.append((name, section, name.removeprefix(prefix).lower()))
                break
        else:
            _check_no_slip(name)
    for name, section, key in found:
        given[section, key] = _convert(section, key, environ[name], name, strict=False), name


def _check_no_slip(name: str) -> None:
    """Refuse a variable that almost names a setting. Others belong to clients, launchers and kernels."""
    if not name.startswith("ALLREDUCED_") or name in _SHORT or name in _OF_OTHERS:
        return
    valid = [f"ALLREDUCED_{section}_{key}".upper() for section in _SECTIONS for key in _keys(section)]
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.85)
    if close:
        raise ConfigError(f"there is no setting {name}", path=name, hint=f"did you mean {close[0]}?")


def _keys(section: str) -> tuple[str, ...]:
    return _SECTIONS[section].__struct_fields__


def _from_overrides(overrides: Overrides, given: dict[tuple[str, str], _Given]) -> None:
    for name, value in overrides.items():
        section, _, key = name.partition(".")
        if section not in _SECTIONS:
            raise _unknown("section", section, list(_SECTIONS), name)
        given[section, key] = _convert(section, key, value, name, strict=False), name


def _convert(section: str, key: str, value: object, where: str, *, strict: bool) -> object:
    """Return ``value`` as the type of the setting."""
    hints = get_type_hints(_SECTIONS[section], include_extras=True)
    if key not in hints or key.startswith("_"):
        raise _unknown("key", key, _keys(section), where)
    hint = hints[key]
    if isinstance(value, str) and _is_size(hint):
        try:
            value = parse_size(value)
        except ValueError:
            raise ConfigError(
                f"{where} is {value!r}, which is no size",
                path=where,
                hint="write bytes, or a number with KiB, MiB, GiB or TiB",
            ) from None
    elif isinstance(value, str) and _is_tuple(hint):
        items = [item.strip() for item in value.split(",") if item.strip()]
        value = [_peer(item, where) for item in items] if key == "static" else items
    try:
        return msgspec.convert(value, hint, strict=strict)
    except msgspec.ValidationError as error:
        said, _, inner = str(error).partition(" - at `$")
        raise ConfigError(
            f"{where}{inner.rstrip('`')} is {_shown(key, value)}: {said}",
            path=f"{where}{inner.rstrip('`')}",
            hint=_allowed(hint),
        ) from None


def _peer(text: str, where: str) -> dict[str, str]:
    node, separator, address = text.partition("=")
    if not separator:
        raise ConfigError(f"{where}: {text!r} is not node=address", path=where, hint="such as b=tcp://10.0.0.2:4123")
    return {"node": node.strip(), "address": address.strip()}


def _shown(key: str, value: object) -> str:
    return "not shown" if key == "secret" else repr(value)


def _unknown(what: str, name: str, valid: Sequence[str], where: str) -> ConfigError:
    close = difflib.get_close_matches(name, valid, n=1)
    suggestion = f"did you mean {close[0]!r}? " if close else ""
    return ConfigError(f"{where}: unknown {what} {name!r}", path=where, hint=f"{suggestion}valid: {', '.join(valid)}")


def _allowed(hint: object) -> str:
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(plain) is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(plain))
    return ", ".join(meta.description for meta in _metas(hint) if meta.description)


def _metas(hint: object) -> list[Meta]:
    found = [argument for argument in get_args(hint)[1:] if isinstance(argument, Meta)]
    return found if get_origin(hint) is Annotated else []


def _is_size(hint: object) -> bool:
    return any(meta.extra == _SIZE for meta in _metas(hint))


def _is_tuple(hint: object) -> bool:
    return get_origin(get_args(hint)[0] if get_origin(hint) is Annotated else hint) is tuple


# Relations


def _check(settings: Settings, places: Mapping[str, str]) -> None:
    """Check what one value alone does not tell. ``places``: where each setting was given, for errors.

    :raises ConfigError: a value contradicts another or is malformed.
    """

    def wrong(key: str, message: str, hint: str = "") -> ConfigError:
        setting, bracket, rest = key.partition("[")
        where = places.get(setting, setting) + bracket + rest
        return ConfigError(f"{where}: {message}", path=where, hint=hint)

    tile = settings.engine.tile_bytes
    # Tests of code paths for many tiles go below with the tile of a group, which is not a setting.
    if tile & (tile - 1) or not 256 << 10 <= tile <= 4 << 20:
        raise wrong("engine.tile_bytes", f"{tile} cannot be a tile", "a power of two from 256KiB to 4MiB")
    limits = settings.limits
    if limits.arena_bytes and limits.arena_bytes < 16 * tile:
        raise wrong("limits.arena_bytes", "it has no room for 16 tiles", f"at least {_human(16 * tile)}")
    if limits.arena_bytes and limits.arena_bytes_per_client > limits.arena_bytes:
        raise wrong("limits.arena_bytes_per_client", "it is more than arena_bytes", "at most arena_bytes")
    if settings.agent.socket:
        try:
            parse_socket(settings.agent.socket)
        except ConfigError as error:
            raise wrong("agent.socket", error.message, error.hint) from error

    def check_address(key: str, text: str, *, any_port: bool = False) -> None:
        if text.startswith("inproc://"):
            return
        try:
            address = parse_address(text, any_port=any_port)
        except ConfigError as error:
            raise wrong(key, error.message, error.hint) from error
        if address.scheme not in schemes():
            raise wrong(key, f"there is no transport {address.scheme!r} ({text})", "write tcp://host:port")

    peers = settings.peers
    if peers.listen:
        check_address("peers.listen", peers.listen, any_port=True)
    if peers.advertise:
        check_address("peers.advertise", peers.advertise)
    names: set[str] = set()
    for at, peer in enumerate(peers.static):
        check_address(f"peers.static[{at}].address", peer.address)
        if peer.node in names:
            raise wrong(f"peers.static[{at}].node", f"{peer.node!r} is listed twice", "node names are unique")
        names.add(peer.node)


def _toml(value: object, *, size: bool = False) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f'"{_human(value)}"' if size and value and value % 1024 == 0 else str(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return repr(value) if isinstance(value, float) else json.dumps(value)


def _human(nbytes: int) -> str:
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)
