"""Finds a transport by its scheme. The module of a transport is loaded when it is first asked for."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Final

from allreduced.core.errors import ConfigError, InternalError
from allreduced.transports.base import Transport

_MODULES: Final[dict[str, str]] = {
    "auto": "allreduced.transports.rdma.auto",
    "inproc": "allreduced.transports.inproc",
    "rdma": "allreduced.transports.rdma.required",
    "tcp": "allreduced.transports.tcp",
}
"""Where each scheme is implemented. The module's ``TRANSPORT`` is a class without constructor arguments."""


def schemes() -> tuple[str, ...]:
    """Return the schemes that there are."""
    return tuple(sorted(_MODULES))


@cache
def transport(scheme: str) -> Transport:
    """Return the transport of ``scheme``; the same object each time.

    :raises ConfigError: there is no such scheme; the message lists those that there are.
    """
    if scheme not in _MODULES:
        raise ConfigError(
            f"there is no transport {scheme!r}", hint=f"use one of {', '.join(f'{known}://' for known in schemes())}"
        )
    made = importlib.import_module(_MODULES[scheme]).TRANSPORT()
    if not isinstance(made, Transport):
        raise InternalError(f"{_MODULES[scheme]}.TRANSPORT is no Transport")
    return made


def scheme_of(address: str) -> str:
    """Return the scheme of ``scheme://…``.

    :raises ConfigError: the address has none.
    """
    scheme, separator, _ = address.partition("://")
    if not separator or not scheme:
        raise ConfigError(
            f"the address {address!r} names no transport",
            hint="write it as scheme://host:port, such as tcp://node1:4123",
        )
    return scheme
