"""Whether this node can prove that it belongs, and whether strangers could."""

from __future__ import annotations

from collections.abc import Iterator

from allreduced.core.errors import AllReducedError
from allreduced.daemon.doctor.finding import Finding, ok, refused, warning
from allreduced.daemon.settings import Settings, secret_bytes

SUBJECT = "security"

SHORT_SECRET = 16
"""Bytes below which a secret can be guessed."""


def examine_security(settings: Settings, *, remote: bool) -> Iterator[Finding]:
    """Read the secret as the agent does, and yield what is to be said. ``remote``: there are other machines."""
    try:
        secret = secret_bytes(settings)
    except AllReducedError as error:
        yield refused(SUBJECT, error)
        return
    if secret:
        if len(secret) < SHORT_SECRET:
            yield warning(
                SUBJECT,
                f"the secret has {len(secret)} bytes, and whoever can dial an agent can try to guess it",
                "head -c 32 /dev/urandom | base64 > secret; the same file on all nodes, mode 600",
            )
        else:
            yield ok(SUBJECT, f"a shared secret of {len(secret)} bytes; what it is, peers check when they link")
    elif remote:
        if settings.security.insecure:
            yield warning(
                SUBJECT,
                "peers on other machines need no secret (security.insecure): whoever reaches the port is an agent",
                "set security.secret_file on all nodes, and insecure = false",
            )
        else:
            yield warning(
                SUBJECT,
                "there is no shared secret, and an agent that other machines can reach will not start without one",
                "set security.secret_file to the same secret on all nodes",
            )
    else:
        yield ok(SUBJECT, "no secret, and no agents on other machines")
