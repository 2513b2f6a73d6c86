"""Job secrets: they keep processes apart that run as one user, without ever going over a socket.

A client tells its agent a digest, keyed by the secret and bound to job and group; agents tell each other the proof of
the claim, which is bound to the user as well and from which the digest cannot be made. Ranks whose proofs differ never
meet.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Annotated, TypeAlias

from allreduced.core.identity import GroupKey
from allreduced.core.limits import AtMost

SIZE = 32
"""Bytes of a digest and of a proof."""

NO_SECRET = b""
"""The digest, and the proof, of who gives no secret."""

Digest: TypeAlias = Annotated[bytes, AtMost(SIZE)]
"""32 bytes, or none."""


def digest_of(secret: bytes, job: str, group: str) -> bytes:
    """Return what a client tells its agent of the secret of its job: HMAC-SHA256, keyed by the secret."""
    named = job.encode()
    return hmac.digest(secret, b"allreduced job" + struct.pack("<I", len(named)) + named + group.encode(), "sha256")


def proof_of(digest: bytes, key: GroupKey) -> bytes:
    """Return what an agent tells others of a claim whose client gave this digest."""
    if not digest:
        return NO_SECRET
    return hashlib.sha256(b"allreduced claim" + struct.pack("<I", key.uid) + digest).digest()
