"""Whether this node can prove that it belongs, and whether strangers could."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from allreduced.core.errors import AllReducedError
from allreduced.daemon.certificate_end import End
from allreduced.daemon.certificate_files import files_of
from allreduced.daemon.credentials import WARN_BEFORE, FileCredentials
from allreduced.daemon.doctor.finding import Finding, note, ok, refused, warning
from allreduced.daemon.settings import Settings, secret_bytes

SUBJECT: Final = "security"
CERTIFICATE: Final = "certificate"

SHORT_SECRET: Final = 16
"""Bytes below which a secret can be guessed."""


@dataclass(frozen=True, slots=True)
class SecurityFacts:
    """What secret and certificates are like.

    ``secret``: None where one of the files cannot be used: ``read`` says why. ``certificates``: links need them.
    ``read``: what is to be said of the files.
    """

    secret: bytes | None
    insecure: bool
    certificates: bool
    read: tuple[Finding, ...] = ()


def security_facts(settings: Settings) -> SecurityFacts:
    """Read secret and certificates as the agent does."""
    insecure = settings.security.insecure
    try:
        secret = secret_bytes(settings)
        files = files_of(settings.security)
    except AllReducedError as error:
        return SecurityFacts(None, insecure, False, (refused(SUBJECT, error),))
    if files is None:
        return SecurityFacts(secret, insecure, False)
    node = settings.agent.node or socket.gethostname()
    try:
        end = FileCredentials(files, node).end
    except AllReducedError as error:
        return SecurityFacts(secret, insecure, True, (refused(CERTIFICATE, error),))
    return SecurityFacts(secret, insecure, True, (judge_expiry(node, end.at - time.time(), end),))


def judge_security(facts: SecurityFacts, *, remote: bool) -> Iterator[Finding]:
    """Yield what is to be said about security. ``remote``: agents on other machines are listed. Pure."""
    yield from facts.read
    if facts.secret is not None:
        yield judge_secret(facts.secret, remote=remote, insecure=facts.insecure, certificates=facts.certificates)


def judge_expiry(node: str, left: float, end: End) -> Finding:
    """Return what is to be said about certificates that are in order, of which the first ends in ``left`` s. Pure."""
    days = left / 86400
    if left < WARN_BEFORE:
        return warning(
            CERTIFICATE,
            f"the certificate of {end.subject} in {end.file} ends in {days:.1f} days",
            f"{end.hint(node)}; the agent takes new files without a restart",
        )
    return ok(CERTIFICATE, f"certificate, key and authority of {node} fit each other, for {days:.0f} more days")


def judge_secret(secret: bytes, *, remote: bool, insecure: bool, certificates: bool) -> Finding:
    """Return what is to be said about the shared secret. ``certificates``: links need them, too. Pure."""
    if secret:
        if len(secret) < SHORT_SECRET and not certificates:
            return warning(
                SUBJECT,
                f"the secret has {len(secret)} bytes, and whoever can dial an agent can try to guess it",
                "openssl rand -hex 32 | install -m600 -o allreduced /dev/stdin /etc/allreduced/secret",
            )
        return ok(SUBJECT, f"a shared secret of {len(secret)} bytes; whether it is that of the others, links tell")
    if certificates:
        return ok(SUBJECT, "links are encrypted, and both ends prove their names")
    if not remote:
        return ok(SUBJECT, "no secret, and no listed agents on other machines")
    if insecure:
        return warning(
            SUBJECT,
            "peers on other machines need no secret (security.insecure): whoever reaches the port is an agent",
            "set security.secret_file on all nodes, and insecure = false",
        )
    return note(
        SUBJECT,
        "there is no shared secret; an agent that other machines can reach does not start without one",
        "set security.secret_file to the same secret on all nodes",
    )
