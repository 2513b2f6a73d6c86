"""Reads the settings of an agent, in one place: from a file, the environment and the command line.

``ALLREDUCED_<SECTION>_<KEY>`` overrides the file, the command line overrides both. ``ALLREDUCED_SECRET`` and
``ALLREDUCED_INSECURE`` are short names of the two settings of ``[security]`` that private agents need.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, TypeAlias, get_args, get_origin, get_type_hints

import msgspec

from allreduced.core.errors import ConfigError
from allreduced.daemon.private_file import reading_hint
from allreduced.daemon.settings import CONFIG_VERSION, SECTIONS, Settings, is_size, metas_of
from allreduced.daemon.settings_rules import check
from allreduced.daemon.sizes import parse_size

_Given: TypeAlias = "tuple[object, str]"
"""A value, and the place where it was given: in the file, a variable, an option."""
Overrides: TypeAlias = "Mapping[str, object]"
"""``section.key`` to value; text is read as in an environment variable."""

_LARGEST: Final = 2**63 - 1
"""No setting is a larger number, or lower than the negative one."""
_LONGEST: Final = 16 << 20
"""Bytes of a configuration; that is room for a hundred thousand peers."""
_DEEPEST: Final = 8
"""Levels of lists and tables in one setting; peers.static has three."""
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""What Python makes of bytes that are no UTF-8, in variables and options."""

_SHORT: Final = {"ALLREDUCED_SECRET": ("security", "secret"), "ALLREDUCED_INSECURE": ("security", "insecure")}
_OF_OTHERS: Final = frozenset(
    f"ALLREDUCED_{name}"
    for name in (
        "AGENT",
        "JOB",
        "JOB_SECRET",
        "JOIN",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "NODE",
        "NODES",
        "RANK",
        "SIZE",
        "SOCKET",
    )
)


def load(
    path: str | None, environ: Mapping[str, str], overrides: Overrides | None = None, *, again: bool = False
) -> Settings:
    """Read the file at ``path`` (None: no file) and return the settings.

    ``again``: it was read before, so it must be a regular file: a pipe, which a start may read from, is empty by now.

    :raises ConfigError: the file cannot be read, or something in it, in a variable or in an override is wrong.
    """
    text = None
    if path is not None:
        try:
            text = _bytes_of(path, again=again).decode()
        except (OSError, UnicodeDecodeError) as error:
            reason, hint = "it is not UTF-8", ""
            if isinstance(error, OSError):
                reason, hint = error.strerror or str(error), reading_hint(path, error)
            raise ConfigError(f"the configuration {path} cannot be read: {reason}", path=path, hint=hint) from error
    return parse(text, path or "", environ, overrides or {})


def _bytes_of(path: str, *, again: bool) -> bytes:
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_NONBLOCK if again else 0)  # a pipe that nobody writes to must not hang
    with os.fdopen(os.open(path, flags), "rb") as file:
        if again and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(
                f"the configuration {path} cannot be read again: it is no regular file",
                path=path,
                hint="put a file in its place; pipes and devices are read at a start only",
            )
        data = file.read(_LONGEST + 1)  # bounded: it may be a device that never ends
    if len(data) > _LONGEST:
        raise ConfigError(f"the configuration {path} is longer than {_LONGEST} bytes", path=path)
    return data


def parse(text: str | None, path: str, environ: Mapping[str, str], overrides: Overrides) -> Settings:
    """Return the settings that a TOML text, variables and overrides make; a pure function of them.

    Later ones win. ``path`` names the file in errors.

    :raises ConfigError: an unknown key or a bad value; ``path`` says where, the hint what is allowed.
    """
    given: dict[tuple[str, str], _Given] = {}
    _from_file(text, path, given)
    _from_environ(environ, given)
    _from_overrides(overrides, given)
    values: dict[str, dict[str, object]] = {name: {} for name in SECTIONS}
    for (section, key), (value, _) in given.items():
        values[section][key] = value
    settings = Settings(**{name: SECTIONS[name](**keys) for name, keys in values.items()})  # type: ignore[arg-type] # each value was converted to its field's type
    check(settings, {f"{section}.{key}": where for (section, key), (_, where) in given.items()})
    return settings


def _from_file(text: str | None, path: str, given: dict[tuple[str, str], _Given]) -> None:
    if text is None:
        return
    try:
        document = msgspec.toml.decode(text)
    except (msgspec.DecodeError, ValueError) as error:  # the latter: a number of thousands of digits
        raise ConfigError(f"{path} is no TOML: {error}", path=path) from error
    except RecursionError:
        raise ConfigError(f"{path} is no TOML that can be read: brackets in brackets, too deep", path=path) from None
    version = document.pop("version", CONFIG_VERSION)
    _check_plain(version, f"{path or 'configuration'}: $.version", "a number")
    _check_version(version, path)
    for section, keys in document.items():
        where = f"{path or 'configuration'}: $.{section}"
        if section not in SECTIONS:
            raise _unknown("section", section, list(SECTIONS), where)
        if not isinstance(keys, dict):
            raise ConfigError(f"{where} is a section", path=where, hint=f"write [{section}] and keys under it")
        for key, value in keys.items():
            place = f"{where}.{key}"
            given[section, key] = _convert(section, key, value, place, strict=True), place


def _check_version(version: object, path: str) -> None:
    """Check the number of the file's form, before anything else of it is judged by this version's rules."""
    where = f"{path or 'configuration'}: $.version"
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ConfigError(
            f"{where} is {version!r}, which is no version",
            path=where,
            hint=f"a number, {CONFIG_VERSION} for this agent",
        )
    if version > CONFIG_VERSION:
        raise ConfigError(
            f"{where}: the configuration is of version {version}, this agent knows versions up to {CONFIG_VERSION}",
            path=where,
            hint="upgrade allreduced on this node, or give it a configuration of its own version",
        )


def _from_environ(environ: Mapping[str, str], given: dict[tuple[str, str], _Given]) -> None:
    # Short names first, so that the long ones win.
    found = [(name, *_SHORT[name]) for name in _SHORT if environ.get(name)]
    for name in sorted(environ):
        for section in SECTIONS:
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
    valid = [f"ALLREDUCED_{section}_{key}".upper() for section in SECTIONS for key in _keys(section)]
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.85)
    if close:
        raise ConfigError(f"there is no setting {name}", path=name, hint=f"did you mean {close[0]}?")


def _keys(section: str) -> tuple[str, ...]:
    return SECTIONS[section].__struct_fields__


def _from_overrides(overrides: Overrides, given: dict[tuple[str, str], _Given]) -> None:
    for name, value in overrides.items():
        section, _, key = name.partition(".")
        if section not in SECTIONS:
            raise _unknown("section", section, list(SECTIONS), name)
        given[section, key] = _convert(section, key, value, name, strict=False), name


def _check_plain(value: object, where: str, allowed: str) -> None:
    """Refuse what no setting can be, and what an error could not even show."""
    level = [value]
    for _ in range(_DEEPEST):
        for item in level:
            if isinstance(item, int) and abs(item) > _LARGEST:
                raise ConfigError(f"{where} is too large a number", path=where, hint=allowed)
            if isinstance(item, str) and _SURROGATE.search(item):
                raise ConfigError(f"{where} is no UTF-8", path=where, hint="write UTF-8")
            if isinstance(item, str) and "\0" in item:
                raise ConfigError(f"{where} has a NUL character", path=where, hint="leave it out")
        level = [
            part
            for item in level
            if isinstance(item, list | dict)
            for part in (item if isinstance(item, list) else (*item, *item.values()))
        ]
        if not level:
            return
    raise ConfigError(f"{where} has brackets in brackets, too deep", path=where, hint=allowed)


def _convert(section: str, key: str, value: object, where: str, *, strict: bool) -> object:
    """Return ``value`` as the type of the setting."""
    hints = get_type_hints(SECTIONS[section], include_extras=True)
    if key not in hints or key.startswith("_"):
        raise _unknown("key", key, _keys(section), where)
    hint = hints[key]
    _check_plain(value, where, _allowed(hint))
    if isinstance(value, str) and is_size(hint):
        try:
            value = parse_size(value)
        except ValueError:
            raise ConfigError(
                f"{where} is {value!r}, which is no size",
                path=where,
                hint="write bytes, or a number with KiB, MiB, GiB or TiB",
            ) from None
        _check_plain(value, where, _allowed(hint))
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
    return ", ".join(meta.description for meta in metas_of(hint) if meta.description)


def _is_tuple(hint: object) -> bool:
    return get_origin(get_args(hint)[0] if get_origin(hint) is Annotated else hint) is tuple
