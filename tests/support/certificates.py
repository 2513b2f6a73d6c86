"""An authority for tests, and credentials of nodes that it signs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from allreduced.daemon.authority import Issued, new_authority, new_certificate
from allreduced.daemon.certificate_files import CertificateFiles
from allreduced.daemon.credentials import FileCredentials


@dataclass(frozen=True)
class TestAuthority:
    """An authority whose files are in a folder."""

    __test__ = False

    folder: Path
    issued: Issued

    @classmethod
    def make(cls, folder: Path, name: str = "tests") -> TestAuthority:
        """Make one; ``folder`` is made too."""
        folder.mkdir(parents=True, exist_ok=True)
        issued = new_authority(name, datetime.now(UTC), days=3650)
        (folder / "ca.pem").write_bytes(issued.certificate)
        return cls(folder, issued)

    def issue(self, *nodes: str, days: float = 30, begins_in: timedelta = timedelta()) -> CertificateFiles:
        """Write certificate and key for the first node, the others being further names, and return where they are.

        ``days`` may be negative: it has ended. ``begins_in``: it begins an hour before that.
        """
        made = new_certificate(self.issued, nodes[0], datetime.now(UTC) + begins_in, dns=nodes[1:], days=days)
        certificate, key = self.folder / f"{nodes[0]}.pem", self.folder / f"{nodes[0]}.key"
        certificate.write_bytes(made.certificate)
        key.write_bytes(made.key)
        key.chmod(0o600)
        return CertificateFiles(str(self.folder / "ca.pem"), str(certificate), str(key))

    def credentials(self, *nodes: str) -> FileCredentials:
        """Return credentials of the first node."""
        return FileCredentials(self.issue(*nodes), nodes[0])


Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey


@dataclass(frozen=True)
class Made:
    """A certificate that no command of ours makes, and its key."""

    name: str
    key: Key
    pem: bytes

    @property
    def key_pem(self) -> bytes:
        """The key, not encrypted."""
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def new_key(kind: str = "EC") -> Key:
    """Return a key: EC, RSA or Ed25519."""
    if kind == "RSA":
        return rsa.generate_private_key(65537, 2048)
    return ed25519.Ed25519PrivateKey.generate() if kind == "Ed25519" else ec.generate_private_key(ec.SECP256R1())


def make(
    name: str,
    signer: Made | None = None,
    *,
    days: float = 100,
    begins_in: timedelta = timedelta(),
    ca: bool = True,
    key: Key | None = None,
    identifier: bytes = b"",
) -> Made:
    """Make a certificate of an authority, or of the node ``name``, that ``signer`` or its own key signs.

    ``identifier``: what it calls its key; by default the hash that everybody takes.
    """
    key = key or new_key()
    issuer, signing = (name, key) if signer is None else (signer.name, signer.key)
    now = datetime.now(UTC)
    usual = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins_in - timedelta(days=100))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier(identifier) if identifier else usual, critical=False)
    )
    if signer is not None:
        named = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
        builder = builder.add_extension(named, critical=False)
    algorithm = None if isinstance(signing, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return Made(name, key, builder.sign(signing, algorithm).public_bytes(Encoding.PEM))


def write(folder: Path, ca: bytes, certificate: bytes, key: bytes) -> CertificateFiles:
    """Write the three files of an agent and return where they are."""
    files = CertificateFiles(*(str(folder / name) for name in ("ca.pem", "node.pem", "node.key")))
    for path, data in ((files.ca, ca), (files.certificate, certificate), (files.key, key)):
        Path(path).write_bytes(data)
    Path(files.key).chmod(0o600)
    return files


def environment(files: CertificateFiles) -> dict[str, str]:
    """Return the variables with which an agent uses the files."""
    return {
        "ALLREDUCED_SECURITY_MODE": "mtls",
        "ALLREDUCED_SECURITY_CA": files.ca,
        "ALLREDUCED_SECURITY_CERTIFICATE": files.certificate,
        "ALLREDUCED_SECURITY_KEY": files.key,
    }
