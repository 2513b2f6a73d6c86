"""Makes a small certificate authority, and the certificates of nodes that it signs. Nothing here touches a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import IPv4Address, IPv6Address
from typing import TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from allreduced.core.errors import ConfigError

_SKEW = timedelta(hours=1)
"""How far the clock of a node may be behind."""

_SigningKey: TypeAlias = (
    ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey
)

_NODE_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,250}[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, in PEM; the key is not encrypted."""

    certificate: bytes
    key: bytes


def check_node_name(node: str) -> None:
    """Check that a certificate can hold the name.

    :raises ConfigError: it cannot.
    """
    if not _NODE_NAME.fullmatch(node):
        raise ConfigError(
            f"{node!r} cannot be in a certificate",
            path="node",
            hint="names of nodes under TLS have letters, digits, '.', '-' and '_', at most 252",
        )


def new_authority(name: str, now: datetime, *, days: float) -> Issued:
    """Make an authority that signs certificates of nodes only, and ends ``days`` after ``now``."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = _usage(signs_certificates=True)
    builder = (
        _builder(subject, subject, key.public_key(), now, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _issued(builder.sign(key, hashes.SHA256()), key)


def new_certificate(
    authority: Issued,
    node: str,
    now: datetime,
    *,
    days: float,
    dns: Sequence[str] = (),
    addresses: Sequence[IPv4Address | IPv6Address] = (),
    called: str = "the authority",
) -> Issued:
    """Make a key and a certificate for the agent of ``node``. ``dns``, ``addresses``: further names in it.

    It ends ``days`` after ``now``, and with the authority's at the latest. The authority may have a key of its own kind
    (EC, RSA, Ed25519, Ed448), and other certificates beside its own. ``called``: what errors call it.

    :raises ConfigError: the authority or a name is of no use.
    """
    for name in (node, *dns):
        check_node_name(name)
    signer, parent = _signer(authority, called)
    _check_dates(parent, now, called)
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.DNSName(name) for name in dict.fromkeys((node, *dns))]
    names += [x509.IPAddress(address) for address in addresses]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node[:64])])
    last = parent.not_valid_after_utc
    builder = (
        _builder(subject, parent.subject, key.public_key(), now, days, last)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_identifier(parent, signer), critical=False)
    )
    algorithm = None if isinstance(signer, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey) else hashes.SHA256()
    return _issued(builder.sign(signer, algorithm), key)


def _signer(authority: Issued, called: str) -> tuple[_SigningKey, x509.Certificate]:
    """Return the key that signs, and the certificate that it belongs to."""
    try:
        signer = load_pem_private_key(authority.key, None)
        certificates = x509.load_pem_x509_certificates(authority.certificate)
        if not isinstance(signer, _SigningKey):
            raise ConfigError(f"the key of {called} must be EC, RSA, Ed25519 or Ed448", path="ca")
        found = [parent for parent in certificates if parent.public_key() == signer.public_key()]
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"the certificate or the key of {called} is of no use: {error}", path="ca") from error
    if not found:
        raise ConfigError(f"the key of {called} does not belong to its certificate", path="ca")
    # Of a certificate that was renewed with its key the one that ends last.
    return signer, max(found, key=lambda parent: parent.not_valid_after_utc)


def _check_dates(parent: x509.Certificate, now: datetime, called: str) -> None:
    begins, ends = parent.not_valid_before_utc, parent.not_valid_after_utc
    if ends <= now:
        raise ConfigError(
            f"{called} ended on {ends:%Y-%m-%d}",
            path="ca",
            hint="allreduced certs ca --force (and the same --directory) makes a new one in its place; then every node"
            " needs the new ca.pem and a new certificate: allreduced certs node --force NAME…",
        )
    if begins > now:
        raise ConfigError(
            f"{called} is not valid before {begins:%Y-%m-%d %H:%M} UTC, and here it is {now:%Y-%m-%d %H:%M}",
            path="ca",
            hint="compare the clocks of the machines",
        )


def _identifier(parent: x509.Certificate, signer: _SigningKey) -> x509.AuthorityKeyIdentifier:
    """Return what names the authority's key, as its own certificate does where it does."""
    try:
        named = parent.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(named)


def expiry(certificate: bytes) -> datetime:
    """Return when a certificate in PEM ends."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    days: float,
    last: datetime | None = None,
) -> x509.CertificateBuilder:
    end = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - _SKEW)
        .not_valid_after(end if last is None else min(end, last))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _issued(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Issued:
    return Issued(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
