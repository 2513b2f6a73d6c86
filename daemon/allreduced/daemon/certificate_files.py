"""The files of an agent's certificate, key and authorities: read, and tried out against each other."""

from __future__ import annotations

import os
import ssl
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, Protocol

from allreduced.core.errors import AuthenticationError, ConfigError
from allreduced.daemon.private_file import check_private, reading_hint
from allreduced.daemon.settings import Security
from allreduced.transports.tcp.tls import names_of

_LONGEST: Final = 1 << 20
"""Bytes of a file at most."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Where the authorities, the certificate (with those between, if any) and its key are, in PEM."""

    ca: str
    certificate: str
    key: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was in the files. ``signature``: what they looked like; ``expires``: seconds since 1970."""

    files: CertificateFiles
    signature: tuple[object, ...]
    listening: ssl.SSLContext
    dialling: ssl.SSLContext
    expires: float


def files_of(security: Security) -> CertificateFiles | None:
    """Return where the files are; None where no TLS is wanted.

    :raises ConfigError: some are named without need, or missing.
    """
    given = {"ca": security.ca, "certificate": security.certificate, "key": security.key}
    if security.mode != "mtls":
        for name, value in given.items():
            if value:
                where = f"security.{name}"
                raise ConfigError(f"{where} is given, but TLS is not on", path=where, hint='security.mode = "mtls"')
        return None
    for name, value in given.items():
        if not value:
            where = f"security.{name}"
            hint = "allreduced certs makes an authority, and certificates and keys of nodes"
            raise ConfigError(f'security.mode = "mtls" needs {where}', path=where, hint=hint)
    return CertificateFiles(**given)


def signature_of(files: CertificateFiles) -> tuple[object, ...]:
    """Return what changes when the files do."""
    found = [Path(path).stat() for path in (files.ca, files.certificate, files.key)]
    return tuple((status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size) for status in found)


def load(files: CertificateFiles, node: str) -> Loaded:
    """Read the files for the agent of ``node``, which blocks, and try them out.

    :raises ConfigError: a file cannot be read or is none of its kind.
    :raises AuthenticationError: others may read the key, or peers would not accept the certificate.
    """
    with ExitStack() as stack:
        found = {}
        for name in ("ca", "certificate", "key"):
            descriptor = _open(name, getattr(files, name))
            stack.callback(os.close, descriptor)
            found[name] = descriptor
        check_private("the key", files.key, found["key"])
        signature = signature_of(files)
        listening = _context(ssl.PROTOCOL_TLS_SERVER, files, found)
        dialling = _context(ssl.PROTOCOL_TLS_CLIENT, files, found)
    listening.num_tickets = 0  # sessions are never resumed: each connection shows certificates
    names, expires = _rehearse(files, listening, dialling)
    if node not in names:
        raise AuthenticationError(
            f"the certificate {files.certificate} is for {', '.join(sorted(names)) or 'no node'}, and this agent is"
            f" called {node!r}",
            hint="set agent.node (ALLREDUCED_AGENT_NODE, on each node another one) to the name that its certificate is"
            f" for, or make a certificate: allreduced certs node {node}",
        )
    return Loaded(files, signature, listening, dialling, expires)


def _open(name: str, path: str) -> int:
    where = f"security.{name}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        hint = reading_hint(path, error)
        raise ConfigError(f"{where}: {path} cannot be read: {error.strerror}", path=where, hint=hint) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > _LONGEST:
        os.close(descriptor)
        raise ConfigError(f"{where}: {path} is no file of at most {_LONGEST} bytes", path=where)
    return descriptor


def _context(protocol: int, files: CertificateFiles, found: dict[str, int]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # names of nodes are checked, by the handshake of agents
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET
    try:
        context.load_verify_locations(cadata=os.pread(found["ca"], _LONGEST, 0).decode())
    except (ssl.SSLError, ValueError) as error:
        _no_pem("ca", files.ca, "certificates of authorities", error)
    # From the descriptors, so that what was checked is what is used.
    certificate, key = (f"/proc/self/fd/{found[name]}" for name in ("certificate", "key"))
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"the key {files.key} does not belong to the certificate {files.certificate}", path="security.key"
            ) from error
        kind = "certificate" if not _has_pem(found["certificate"], b"CERTIFICATE") else "key"
        _no_pem(kind, getattr(files, kind), f"a {kind}", error)
    return context


def _has_pem(descriptor: int, kind: bytes) -> bool:
    return b"-----BEGIN " + kind in os.pread(descriptor, _LONGEST, 0)


def _no_password() -> NoReturn:
    raise ConfigError("the key is encrypted; an agent cannot ask for its password", path="security.key")


def _no_pem(name: str, path: str, what: str, error: Exception) -> NoReturn:
    where = f"security.{name}"
    raise ConfigError(f"{where}: {path} does not hold {what} in PEM", path=where) from error


class _Side(Protocol):
    def do_handshake(self) -> None: ...


def _rehearse(
    files: CertificateFiles, listening: ssl.SSLContext, dialling: ssl.SSLContext
) -> tuple[frozenset[str], float]:
    """Let the agent meet itself: whatever peers would refuse shows here. Return the names and the end of validity."""
    to_listener, to_dialler = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialler = dialling.wrap_bio(to_dialler, to_listener)
    listener = listening.wrap_bio(to_listener, to_dialler, server_side=True)
    sides = [dialler, listener]
    try:
        for side in (dialler, listener, dialler, listener):
            if side in sides and _over(side):
                sides.remove(side)
    except ssl.SSLCertVerificationError as error:
        raise AuthenticationError(
            f"peers would not accept the certificate {files.certificate}: {error.verify_message}",
            hint="it must be valid now, signed by an authority in security.ca, and made for server and client",
        ) from error
    except ssl.SSLError as error:
        raise AuthenticationError(f"the certificate {files.certificate} is of no use: {error.reason}") from error
    certificate = dialler.getpeercert() or {}
    return names_of(certificate), float(ssl.cert_time_to_seconds(str(certificate["notAfter"])))


def _over(side: _Side) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
