"""Where metrics are served."""

from __future__ import annotations

import errno
from typing import Final

from allreduced.core.addresses import Address, parse_address
from allreduced.core.errors import ConfigError

LISTEN: Final = "metrics.listen"
"""The setting, as errors name it."""


def listen_address(text: str, path: str = LISTEN) -> Address:
    """Return where ``metrics.listen`` says: ``host:port``, or a port alone, which means the loopback interface.

    :raises ConfigError: it is malformed.
    """
    if text.isascii() and text.isdigit():
        text = f"127.0.0.1:{text}"
    try:
        address = parse_address(text, scheme="http", path=path, any_port=True)
    except ConfigError as error:
        raise ConfigError(
            error.message, path=path, hint="write host:port, such as 127.0.0.1:4124, or a port alone for loopback"
        ) from error
    if address.scheme != "http":
        raise ConfigError(f"{text!r}: only http is served", path=path, hint="write host:port")
    return address


def cannot_listen(address: Address, error: OSError) -> ConfigError:
    """Return the error for an address where metrics cannot be served. Pure."""
    reasons = {
        errno.EADDRINUSE: ("the port is in use", "choose another port, or end what uses this one"),
        errno.EADDRNOTAVAIL: ("no interface of this machine has that address", "write an address of this machine"),
        errno.EACCES: ("it is not permitted", "choose a port above 1023"),
    }
    reason, hint = reasons.get(error.errno or 0, (error.strerror or str(error), "write host:port of this machine"))
    return ConfigError(f"metrics cannot be served at {address.host_port}: {reason}", path=LISTEN, hint=hint)
