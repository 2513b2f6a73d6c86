"""How many connections and attaches of this process came to nothing, by plane and kind. For metrics.

Logs are limited in lines, these numbers are not: each one counts, also where nothing was written about it.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import Final

from allreduced.core.channel import CertificateError
from allreduced.core.errors import AuthenticationError, LimitExceeded, ProtocolError


class Plane(enum.StrEnum):
    """Who was at the other end."""

    CLIENTS = "clients"
    PEERS = "peers"


class Kind(enum.StrEnum):
    """Why."""

    ACCESS = "access"
    """A user who may not attach."""
    SECRET = "secret"
    """Another secret, or none: of the agents, or of a job."""
    TLS = "tls"
    """No TLS, or a certificate that is not accepted or is for another node."""
    NAME = "name"
    """An agent whose name another one bears."""
    LIMIT = "limit"
    """One too many, or it does not read what it is sent."""
    PROTOCOL = "protocol"
    """Something that is no message, or another version."""
    TIMEOUT = "timeout"
    """It did not say in time who it is."""
    HUNG_UP = "hung_up"
    """It ended in the middle."""
    OTHER = "other"


_PEERS: Final = (Kind.SECRET, Kind.TLS, Kind.NAME, Kind.LIMIT, Kind.PROTOCOL, Kind.TIMEOUT, Kind.HUNG_UP, Kind.OTHER)
_CLIENTS: Final = (Kind.ACCESS, Kind.SECRET, Kind.LIMIT, Kind.PROTOCOL, Kind.TIMEOUT, Kind.HUNG_UP, Kind.OTHER)

POSSIBLE: Final = (*((Plane.CLIENTS, kind) for kind in _CLIENTS), *((Plane.PEERS, kind) for kind in _PEERS))
"""All pairs that there can be."""

REFUSED: Final[Counter[tuple[Plane, Kind]]] = Counter()
"""For this process, as logging itself is."""


def kind_of(error: BaseException, authentication: Kind = Kind.SECRET) -> Kind:
    """Return the kind of a refusal. ``authentication``: what an ``AuthenticationError`` without more means here."""
    match error:
        case CertificateError():
            return Kind.TLS
        case AuthenticationError():
            return authentication
        case LimitExceeded():
            return Kind.LIMIT
        case ProtocolError():
            return Kind.PROTOCOL
        case TimeoutError():
            return Kind.TIMEOUT
        case OSError():
            return Kind.HUNG_UP
        case _:
            return Kind.OTHER


def refused(plane: Plane, kind: Kind) -> None:
    """Count one more."""
    REFUSED[plane, kind] += 1
