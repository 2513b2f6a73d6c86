"""The files of an agent's certificate, key and authorities: read, and tried out against each other."""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import stat
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from allreduced.core.errors import AuthenticationError, ConfigError
from allreduced.daemon.certificate_blocks import passed_over
from allreduced.daemon.certificate_end import End, first_end
from allreduced.daemon.private_file import check_private, reading_hint
from allreduced.daemon.settings import Security
from allreduced.transports.tcp.tls import names_of

_LONGEST: Final = 1 << 20
"""Bytes of a file at most."""

_CERTIFICATE: Final = re.compile(rb"-----BEGIN (TRUSTED |X509 )?CERTIFICATE-----")
_KEY: Final = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")

_MISMATCH: Final = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})
"""Reasons of OpenSSL: key and first certificate differ. The last one: they are not even of one type."""

_WEAK: Final = frozenset({"EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"})
"""Reasons of OpenSSL: a certificate that it can read and does not take."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Where the authorities, the certificate (with those between, if any) and its key are, in PEM."""

    ca: str
    certificate: str
    key: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was in the files.

    ``signature``: what they looked like; ``digest``: of what was in them; ``end``: which certificate ends first.
    """

    files: CertificateFiles
    signature: tuple[object, ...]
    digest: bytes
    listening: ssl.SSLContext
    dialling: ssl.SSLContext
    end: End

    @property
    def expires(self) -> float:
        """When peers stop to accept the certificate, in seconds since 1970."""
        return self.end.at


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
    """Return what changes when the files do, or who may use them.

    :raises OSError: one is not there.
    """
    return _signature(Path(path).stat() for path in (files.ca, files.certificate, files.key))


def _signature(found: Iterable[os.stat_result]) -> tuple[object, ...]:
    return tuple(
        (
            *(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns),
            *(status.st_mode, status.st_uid, status.st_gid),
        )
        for status in found
    )


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
        # Of what is open here, and before it is read: a file that is replaced meanwhile looks different afterwards.
        signature = _signature(os.fstat(descriptor) for descriptor in found.values())
        content = {name: _read(descriptor) for name, descriptor in found.items()}
        for name in ("ca", "certificate"):
            _check_all_read(name, getattr(files, name), content[name])
        listening = _context(ssl.PROTOCOL_TLS_SERVER, files, found)
        dialling = _context(ssl.PROTOCOL_TLS_CLIENT, files, found)
    listening.num_tickets = 0  # sessions are never resumed: each connection shows certificates
    own = _rehearse(files, listening, dialling)
    names = names_of(own)
    if node not in names:
        raise AuthenticationError(
            f"the certificate {files.certificate} is for {', '.join(sorted(names)) or 'no node'}, and this agent is"
            f" called {node!r}",
            hint="set agent.node (ALLREDUCED_AGENT_NODE, on each node another one) to the name that its certificate is"
            f" for, or make a certificate: allreduced certs node {node}",
        )
    end = first_end(
        own,
        (files.certificate, content["certificate"]),
        (files.ca, content["ca"]),
        lambda authorities: _accepted(listening, authorities),
    )
    digest = hashlib.sha256(b"".join(hashlib.sha256(data).digest() for data in content.values())).digest()
    return Loaded(files, signature, digest, listening, dialling, end)


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


def _check_all_read(name: str, path: str, data: bytes) -> None:
    missing = passed_over(data)
    if missing is not None:
        where = f"security.{name}"
        raise ConfigError(
            f"{where}: {path} has {missing.there} certificates, and OpenSSL reads {missing.read} of them",
            path=where,
            hint=missing.hint(path),
        )


def _bare_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # names of nodes are checked, by the handshake of agents
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _context(protocol: int, files: CertificateFiles, found: dict[str, int]) -> ssl.SSLContext:
    context = _bare_context(protocol)
    # From the descriptors, so that what was checked is what is used. Text around the blocks of PEM does not matter.
    ca, certificate, key = (f"/proc/self/fd/{found[name]}" for name in ("ca", "certificate", "key"))
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        if not _CERTIFICATE.search(_read(found["ca"])):
            _no_pem("ca", files.ca, "certificates of authorities", error)
        _refused_file("ca", files.ca, error)
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except ssl.SSLError as error:
        _no_pair(files, found, error)
    return context


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, _LONGEST, 0)


def _no_password() -> NoReturn:
    raise ConfigError("the key is encrypted; an agent cannot ask for its password", path="security.key")


def _no_pair(files: CertificateFiles, found: dict[str, int], error: ssl.SSLError) -> NoReturn:
    """Say which of certificate and key is of no use, and why."""
    certificates = len(_CERTIFICATE.findall(_read(found["certificate"])))
    if not certificates:
        _no_pem("certificate", files.certificate, "a certificate", error)
    if error.reason in _WEAK or not _readable(found["certificate"]):
        _refused_file("certificate", files.certificate, error)
    if not _KEY.search(_read(found["key"])):
        _no_pem("key", files.key, "a key", error)
    if error.reason not in _MISMATCH:
        _refused_file("key", files.key, error)
    which, hint = "certificate", ""
    if certificates > 1:
        which = "first certificate of"
        hint = f"the node's certificate comes first of the {certificates} in the file"
    raise ConfigError(
        f"the key {files.key} does not belong to the {which} {files.certificate}", path="security.key", hint=hint
    ) from error


def _readable(descriptor: int) -> bool:
    """Tell whether OpenSSL can read the certificates in a file, whether or not it takes them."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(f"/proc/self/fd/{descriptor}")
    except ssl.SSLError:
        return False
    return True


def _no_pem(name: str, path: str, what: str, error: Exception) -> NoReturn:
    where = f"security.{name}"
    raise ConfigError(f"{where}: {path} does not hold {what} in PEM", path=where) from error


def _refused_file(name: str, path: str, error: ssl.SSLError) -> NoReturn:
    """Tell what OpenSSL has against a file that does hold PEM."""
    where = f"security.{name}"
    if error.reason in _WEAK:
        hint = "RSA needs 2048 bits or more, and SHA-256; P-256 does as well: allreduced certs"
    else:
        hint = "is all of the file there? Each block of PEM begins and ends with a line of its own"
    raise ConfigError(f"{where}: OpenSSL does not take {path}: {_said(error)}", path=where, hint=hint) from error


def _said(error: ssl.SSLError) -> str:
    """Return the reason of OpenSSL in words."""
    if error.reason:
        return error.reason.lower().replace("_", " ")
    return re.sub(r"^\[.*?\] | \(_ssl.*\)$", "", str(error.args[-1]))


def _rehearse(files: CertificateFiles, listening: ssl.SSLContext, dialling: ssl.SSLContext) -> Mapping[str, object]:
    """Let the agent meet itself: whatever peers would refuse shows here. Return its certificate."""
    dialler, listener = _meeting(listening, dialling)
    sides: list[ssl.SSLObject] = [dialler, listener]
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
        raise AuthenticationError(f"the certificate {files.certificate} is of no use: {_said(error)}") from error
    return dialler.getpeercert() or {}


def _accepted(listening: ssl.SSLContext, authorities: str) -> bool:
    """Tell whether who knows these authorities only would accept the certificate."""
    if not authorities:
        return False
    dialling = _bare_context(ssl.PROTOCOL_TLS_CLIENT)
    dialling.load_verify_locations(cadata=authorities)
    dialler, listener = _meeting(listening, dialling)
    try:
        _over(dialler)
        _over(listener)
        return _over(dialler)  # it has no certificate of its own, and does not get as far as showing one
    except ssl.SSLError:
        return False


def _meeting(listening: ssl.SSLContext, dialling: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Return the two ends of a connection in memory: who dials, and who listens."""
    to_listener, to_dialler = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialler = dialling.wrap_bio(to_dialler, to_listener)
    return dialler, listening.wrap_bio(to_listener, to_dialler, server_side=True)


def _over(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
