"""An authority for tests, and credentials of nodes that it signs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

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


def environment(files: CertificateFiles) -> dict[str, str]:
    """Return the variables with which an agent uses the files."""
    return {
        "ALLREDUCED_SECURITY_MODE": "mtls",
        "ALLREDUCED_SECURITY_CA": files.ca,
        "ALLREDUCED_SECURITY_CERTIFICATE": files.certificate,
        "ALLREDUCED_SECURITY_KEY": files.key,
    }
