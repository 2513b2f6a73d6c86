"""What an encrypted connection tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Channel:
    """A connection between agents that is encrypted, both sides having shown a certificate that the other one accepts.

    ``binding``: bytes that both ends of this very connection know and that no other connection has, so that a proof
    that covers them holds here only. ``names``: the nodes that the other side's certificate is for.
    """

    binding: bytes
    names: frozenset[str]
