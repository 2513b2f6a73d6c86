"""``allreduced certs``: what it makes, and what it does not overwrite."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, x25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID
from tests.support.certificates import Made, make, new_key

from allreduced.cli.main import main
from allreduced.daemon.certificate_files import CertificateFiles
from allreduced.daemon.credentials import FileCredentials


def _run(folder: Path, *arguments: str) -> int:
    return main(["certs", *arguments, *(("--directory", str(folder)) if arguments else ())])


def _certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_an_authority_and_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certs"
    assert _run(folder, "ca") == 0
    assert _run(folder, "node", "a", "gpu_1.rack-2") == 0
    printed = capsys.readouterr().out
    assert f"scp {folder}/ca.pem {folder}/a.pem {folder}/a.key root@a:/etc/allreduced/" in printed
    assert '  mode = "mtls"' in printed
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {
        **{"ca.pem": 0o644, "ca.key": 0o600, "a.pem": 0o644, "a.key": 0o600},
        **{"gpu_1.rack-2.pem": 0o644, "gpu_1.rack-2.key": 0o600},
    }
    for node in ("a", "gpu_1.rack-2"):
        files = CertificateFiles(*(str(folder / name) for name in ("ca.pem", f"{node}.pem", f"{node}.key")))
        FileCredentials(files, node)


def test_what_is_in_the_certificates(tmp_path: Path) -> None:
    assert _run(tmp_path, "ca", "--name", "of tests", "--days", "100") == 0
    command = ("node", "a", "--dns", "a.cluster", "--ip", "10.0.0.1", "--ip", "fd00::1", "--days", "7")
    assert _run(tmp_path, *command) == 0
    now = datetime.now(UTC)
    ca, node = _certificate(tmp_path / "ca.pem"), _certificate(tmp_path / "a.pem")
    basic = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (basic.critical, basic.value.ca, basic.value.path_length) == (True, True, 0)
    assert ca.subject.rfc4514_string() == "CN=of tests"
    assert abs(ca.not_valid_after_utc - now - timedelta(days=100)) < timedelta(minutes=5)
    assert abs(node.not_valid_after_utc - now - timedelta(days=7)) < timedelta(minutes=5)
    assert timedelta(minutes=55) < now - node.not_valid_before_utc < timedelta(minutes=65)
    names = node.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["a", "a.cluster"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "fd00::1"]
    assert set(node.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == {
        ExtendedKeyUsageOID.SERVER_AUTH,
        ExtendedKeyUsageOID.CLIENT_AUTH,
    }
    assert not node.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    node.verify_directly_issued_by(ca)


def test_a_node_does_not_outlive_its_authority(tmp_path: Path) -> None:
    assert _run(tmp_path, "ca", "--days", "3") == 0
    assert _run(tmp_path, "node", "a") == 0
    assert _certificate(tmp_path / "a.pem").not_valid_after_utc == _certificate(tmp_path / "ca.pem").not_valid_after_utc


def test_nothing_is_overwritten_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(tmp_path, "ca") == 0
    assert _run(tmp_path, "node", "b") == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert _run(tmp_path, "ca") == 2
    assert _run(tmp_path, "node", "a", "b") == 2
    assert "--force" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert _run(tmp_path, "node", "--force", "b") == 0
    assert (tmp_path / "b.pem").read_bytes() != before[tmp_path / "b.pem"]
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in before}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("node", "a b"), "cannot be in a certificate"),
        (("node", "../a"), "cannot be in a certificate"),
        (("node", ".."), "cannot be in a certificate"),
        (("node", "ca"), "cannot be called 'ca'"),
        (("node", "a", "b", "--ip", "10.0.0.1"), "are of one node"),
        (("node", "a", "--ip", "10.0.0"), "no IP address"),
        (("node", "a", "--days", "0"), "no number of days"),
        (("node", "a", "--dns", "*.cluster"), "cannot be in a certificate"),
        (("node",), "required"),
        ((), "required"),
    ],
)
def test_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert _run(tmp_path, "ca") == 0
    before = sorted(tmp_path.iterdir())
    assert _run(tmp_path, *arguments) == 2
    assert says in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_a_node_needs_an_authority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(tmp_path, "node", "a") == 2
    assert "allreduced certs ca" in capsys.readouterr().err
    assert _run(tmp_path, "ca") == 0
    (tmp_path / "ca.key").write_text("nothing")
    assert _run(tmp_path, "node", "a") == 2
    assert "of no use" in capsys.readouterr().err


def _own_authority(folder: Path, made: Made, *beside: Made) -> None:
    (folder / "ca.pem").write_bytes("# Autorité Müller\n".encode() + b"".join(one.pem for one in (*beside, made)))
    (folder / "ca.key").write_bytes("# clé\n".encode("latin-1") + made.key_pem)


@pytest.mark.parametrize("kind", ["EC", "RSA", "Ed25519"])
def test_an_authority_of_ones_own_signs_with_its_kind_of_key(tmp_path: Path, kind: str) -> None:
    made = make("site", key=new_key(kind))
    _own_authority(tmp_path, made, make("another"))
    assert _run(tmp_path, "node", "a") == 0
    _certificate(tmp_path / "a.pem").verify_directly_issued_by(x509.load_pem_x509_certificate(made.pem))
    FileCredentials(CertificateFiles(*(str(tmp_path / name) for name in ("ca.pem", "a.pem", "a.key"))), "a")


def test_the_authority_is_named_as_it_names_itself(tmp_path: Path) -> None:
    """Its key's identifier may be computed in another way than here."""
    key = ec.generate_private_key(ec.SECP256R1())
    made = make("site", key=key, identifier=b"of its own")
    _own_authority(tmp_path, made)
    assert _run(tmp_path, "node", "a") == 0
    found = _certificate(tmp_path / "a.pem").extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    assert found.key_identifier == b"of its own"
    FileCredentials(CertificateFiles(*(str(tmp_path / name) for name in ("ca.pem", "a.pem", "a.key"))), "a")


def test_a_key_of_a_kind_that_cannot_sign_is_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _own_authority(tmp_path, make("site"))
    key = x25519.X25519PrivateKey.generate()
    (tmp_path / "ca.key").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
    assert _run(tmp_path, "node", "a") == 2
    assert "must be EC, RSA, Ed25519 or Ed448" in capsys.readouterr().err
    (tmp_path / "ca.key").write_bytes(make("other").key_pem)
    assert _run(tmp_path, "node", "a") == 2
    assert f"the key of the authority in {tmp_path / 'ca.pem'} does not belong" in capsys.readouterr().err


def test_an_authority_that_has_ended_or_not_begun_signs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make("site", days=-2)
    _own_authority(tmp_path, made)
    assert _run(tmp_path, "node", "a") == 2
    ended = x509.load_pem_x509_certificate(made.pem).not_valid_after_utc
    said = capsys.readouterr().err
    assert f"the authority in {tmp_path / 'ca.pem'} ended on {ended:%Y-%m-%d}" in said
    assert "allreduced certs ca --force" in said
    assert not (tmp_path / "a.pem").exists()
    _own_authority(tmp_path, make("site", days=200, begins_in=timedelta(days=150)))
    assert _run(tmp_path, "node", "a") == 2
    said = capsys.readouterr().err
    assert f"the authority in {tmp_path / 'ca.pem'} is not valid before " in said
    assert "compare the clocks" in said
    # What the hint tells to do does help.
    assert _run(tmp_path, "ca", "--force") == 0
    assert _run(tmp_path, "node", "--force", "a") == 0
    FileCredentials(CertificateFiles(*(str(tmp_path / name) for name in ("ca.pem", "a.pem", "a.key"))), "a")
