"""What an encrypted connection between agents tells about itself, and how it fails."""

from __future__ import annotations

from dataclasses import dataclass

from allreduced.core.errors import AuthenticationError


class CertificateError(AuthenticationError):
    """The other agent does not use TLS as this one does, or its certificate is not accepted or is not for its name.

    Elsewhere it is an ``AuthenticationError``: it has no code of its own.
    """


@dataclass(frozen=True, slots=True)
class Channel:
    """A connection between agents that is encrypted, both sides having shown a certificate that the other one accepts.

    ``binding``: bytes that both ends of this very connection know and that no other connection has, so that a proof
    that covers them holds here only. ``names``: the nodes that the other side's certificate is for.
    """

    binding: bytes
    names: frozenset[str]
