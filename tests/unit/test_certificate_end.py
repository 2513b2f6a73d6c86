"""Which certificate ends first: the node's, one between, or the authority's."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.support.certificates import make, write

from allreduced.daemon.certificate_end import End, Role
from allreduced.daemon.credentials import FileCredentials


def _found(folder: Path, ca: bytes, certificate: bytes, key: bytes) -> tuple[Role, str, str, int]:
    """Return role, file, subject and days of the certificate that ends first."""
    end = FileCredentials(write(folder, ca, certificate, key), "a").end
    return end.role, Path(end.file).name, end.subject, round((end.at - time.time()) / 86400)


def test_the_earliest_end_of_the_chain_counts(tmp_path: Path) -> None:
    for node_days, between_days, root_days, wanted in (
        (20, 30, 40, (Role.NODE, "node.pem", "a", 20)),
        (40, 20, 30, (Role.BETWEEN, "node.pem", "between", 20)),
        (30, 40, 20, (Role.AUTHORITY, "ca.pem", "root", 20)),
    ):
        root = make("root", days=root_days)
        between = make("between", root, days=between_days)
        node = make("a", between, days=node_days, ca=False)
        assert _found(tmp_path, root.pem, node.pem + between.pem, node.key_pem) == wanted
        # With the one between beside the root in security.ca instead.
        role, file, subject, days = wanted
        file = "ca.pem" if role is Role.BETWEEN else file
        assert _found(tmp_path, between.pem + root.pem, node.pem, node.key_pem) == (role, file, subject, days)


def test_certificates_that_did_not_sign_do_not_count(tmp_path: Path) -> None:
    root, other = make("root"), make("other", days=1)
    node = make("a", root, days=50, ca=False)
    beside = make("beside", root, days=1)
    ca, certificate = other.pem + root.pem + make("b", root, ca=False, days=1).pem, node.pem + beside.pem
    assert _found(tmp_path, ca, certificate, node.key_pem) == (Role.NODE, "node.pem", "a", 50)


@pytest.mark.parametrize("signed_by_old", [True, False])
def test_of_authorities_of_one_name_the_one_that_signed_counts(tmp_path: Path, signed_by_old: bool) -> None:
    old, new = make("root", days=5), make("root", days=90)
    node = make("a", old if signed_by_old else new, days=50, ca=False)
    wanted = (Role.AUTHORITY, "ca.pem", "root", 5) if signed_by_old else (Role.NODE, "node.pem", "a", 50)
    for ca in (old.pem + new.pem, new.pem + old.pem, old.pem + new.pem + old.pem):
        assert _found(tmp_path, ca, node.pem, node.key_pem) == wanted


def test_of_an_authority_that_was_renewed_with_its_key_the_last_end_counts(tmp_path: Path) -> None:
    old = make("root", days=5)
    new = make("root", days=30, key=old.key)
    node = make("a", old, days=50, ca=False)
    wanted = (Role.AUTHORITY, "ca.pem", "root", 30)
    assert _found(tmp_path, old.pem + new.pem, node.pem, node.key_pem) == wanted


def test_where_both_end_at_once_the_authority_is_the_one_to_replace(tmp_path: Path) -> None:
    from datetime import UTC, datetime

    from allreduced.daemon.authority import new_authority, new_certificate

    now = datetime.now(UTC)
    authority = new_authority("tests", now, days=9)
    node = new_certificate(authority, "a", now, days=100)
    wanted = (Role.AUTHORITY, "ca.pem", "tests", 9)
    assert _found(tmp_path, authority.certificate, node.certificate, node.key) == wanted


def test_what_gives_a_later_end() -> None:
    assert End(Role.NODE, "f", "a", 0.0).hint("a") == "allreduced certs node --force a"
    assert End(Role.BETWEEN, "f", "b", 0.0).hint("a") == "put one that ends later into f"
    assert "beside this one on all nodes" in End(Role.AUTHORITY, "f", "c", 0.0).hint("a")
