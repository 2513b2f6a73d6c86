"""Credentials of an agent: what is refused, and how files are replaced."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.support.certificates import TestAuthority, make, new_key, write

from allreduced.core.errors import AuthenticationError, ConfigError
from allreduced.daemon.certificate_files import CertificateFiles, Loaded, files_of, load
from allreduced.daemon.credentials import FileCredentials
from allreduced.daemon.settings import Security, Settings


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority.make(tmp_path / "ours")


def test_contexts_speak_tls_1_3_and_ask_for_certificates(authority: TestAuthority) -> None:
    credentials = authority.credentials("a")
    for listening in (True, False):
        context = credentials.context(listening=listening)
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
    assert credentials.context(listening=True).num_tickets == 0


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o601, 0o620, 0o666])
def test_keys_that_others_may_use_are_refused(authority: TestAuthority, mode: int) -> None:
    files = authority.issue("a")
    Path(files.key).chmod(mode)
    with pytest.raises(AuthenticationError, match=f"mode {mode:03o}") as caught:
        FileCredentials(files, "a")
    assert caught.value.hint == f"chmod 600 {files.key}"


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_keys_of_the_agent_or_its_group_are_taken(authority: TestAuthority, mode: int) -> None:
    files = authority.issue("a")
    Path(files.key).chmod(mode)
    FileCredentials(files, "a")


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("ca", None, "security.ca: .* cannot be read: No such file"),
        ("key", None, "security.key: .* cannot be read"),
        ("ca", "nothing", "security.ca: .* does not hold certificates of authorities in PEM"),
        ("certificate", "nothing", "security.certificate: .* does not hold a certificate in PEM"),
        ("key", "nothing", "security.key: .* does not hold a key in PEM"),
    ],
)
def test_files_that_are_none(authority: TestAuthority, file: str, content: str | None, says: str) -> None:
    files = authority.issue("a")
    path = Path(getattr(files, file))
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        FileCredentials(files, "a")
    assert caught.value.path == f"security.{file}"


BEFORE = {
    "UTF-8": "# Autorité Müller\n".encode(),
    "Latin-1": "# Autorité Müller\n".encode("latin-1"),
    "BOM": b"\xef\xbb\xbf",
    "all": "\ufeff# Autorité Müller\r\n\r\n".encode() + b"\xff" * 3000 + b"\n",
}


@pytest.mark.parametrize("file", ["ca", "certificate", "key"])
@pytest.mark.parametrize("before", BEFORE)
def test_text_around_the_blocks_does_not_matter(authority: TestAuthority, file: str, before: str) -> None:
    files = authority.issue("a", days=50)
    path = Path(getattr(files, file))
    path.write_bytes(BEFORE[before] + path.read_bytes() + "\n# Ende für heute\n".encode())
    credentials = FileCredentials(files, "a")
    assert credentials.end.file == files.certificate
    path.write_bytes(path.read_bytes() + "# Große Änderung\n".encode("latin-1"))
    assert credentials.look() is not None


@pytest.mark.parametrize("name", ["ca", "certificate"])
@pytest.mark.parametrize(
    ("before", "hint"),
    [
        (b"\n\xef\xbb\xbf", r"line {line} begins with a byte order mark, .*: sed -i '{line}s/^\xef\xbb\xbf//' {path}"),
        (b" ", "-----BEGIN must be at the beginning of line {line}"),
        (b"# ", "-----BEGIN must be at the beginning of line {line}"),
    ],
    ids=["mark", "space", "comment"],
)
def test_certificates_that_openssl_passes_over_are_told(tmp_path: Path, name: str, before: bytes, hint: str) -> None:
    root, other = make("root"), make("other")
    between = make("between", root)
    node = make("a", between, ca=False)
    pair = {"ca": (other.pem, root.pem), "certificate": (node.pem, between.pem)}[name]
    files = write(tmp_path, other.pem + root.pem, node.pem + between.pem, node.key_pem)
    load(files, "a")
    path = Path(getattr(files, name))
    first, second = pair
    path.write_bytes(first + before + second)
    with pytest.raises(ConfigError) as caught:
        load(files, "a")
    assert caught.value.path == f"security.{name}"
    assert caught.value.message == f"security.{name}: {path} has 2 certificates, and OpenSSL reads 1 of them"
    begin, _, end = hint.format(line=(first + before).count(b"\n") + 1, path=path).partition(".*")
    assert caught.value.hint.startswith(begin)
    assert caught.value.hint.endswith(end)


def test_the_command_that_removes_a_byte_order_mark_mends_the_file(tmp_path: Path) -> None:
    root, other = make("root"), make("other")
    node = make("a", root, ca=False)
    mark = b"\xef\xbb\xbf"  # right behind another block it does no harm
    files = write(tmp_path, other.pem + mark + other.pem + b"# mine\n" + mark + root.pem, node.pem, node.key_pem)
    with pytest.raises(ConfigError) as caught:
        load(files, "a")
    subprocess.run(["sh", "-c", caught.value.hint.partition(": ")[2]], check=True)
    assert Path(files.ca).read_bytes() == other.pem + mark + other.pem + b"# mine\n" + root.pem
    load(files, "a")


def test_what_is_no_further_certificate_is_not_missed(tmp_path: Path) -> None:
    root = make("root")
    node = make("a", root, ca=False)
    text = b"# -----BEGIN CERTIFICATE----- is how one begins\n# " + root.pem.replace(b"\n", b"\n# ") + b"\n"
    for ca in (root.pem + text + root.pem, b"\xef\xbb\xbf" + root.pem + root.pem, root.pem + node.key_pem):
        load(write(tmp_path, ca, node.pem + node.key_pem, node.key_pem), "a")


@pytest.mark.parametrize("file", ["ca", "certificate", "key"])
def test_blocks_that_are_broken_are_told_with_the_reason(authority: TestAuthority, file: str) -> None:
    files = authority.issue("a")
    path = Path(getattr(files, file))
    good = path.read_bytes()
    at = good.index(b"\n") + 1
    spoilt = [good[:100], good[:at] + "ü".encode() + good[at:], good[:at] + b"AAAA" + good[at + 4 :]]
    if file != "key":  # of which there is one, and what comes after it is text
        spoilt += [good + good[:100], good.rstrip() + good]
    for data in spoilt:
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=f"security.{file}: OpenSSL does not take {path}: [a-zA-Z]") as caught:
            FileCredentials(files, "a")
        assert caught.value.path == f"security.{file}"


def test_a_key_that_is_too_short_is_told_as_such(tmp_path: Path) -> None:
    root, short = make("root"), rsa.generate_private_key(65537, 1024)
    node = make("a", root, ca=False, key=short)
    with pytest.raises(ConfigError, match=r"node\.pem: ee key too small") as caught:
        load(write(tmp_path, root.pem, node.pem, node.key_pem), "a")
    assert (caught.value.path, "2048" in caught.value.hint) == ("security.certificate", True)
    between = make("between", root, key=short)
    node = make("a", between, ca=False)
    with pytest.raises(ConfigError, match=r"node\.pem: ca key too small") as caught:
        load(write(tmp_path, root.pem, node.pem + between.pem, node.key_pem), "a")
    assert caught.value.path == "security.certificate"


@pytest.mark.parametrize("kind", ["EC", "RSA", "Ed25519"])
def test_a_chain_in_the_wrong_order_is_told_as_such(tmp_path: Path, kind: str) -> None:
    root = make("root")
    between = make("between", root, key=new_key(kind))
    node = make("a", between, ca=False)
    load(write(tmp_path, root.pem, node.pem + between.pem, node.key_pem), "a")
    says = "the key .*node.key does not belong to the first certificate of .*node.pem"
    with pytest.raises(ConfigError, match=says) as caught:
        load(write(tmp_path, root.pem, between.pem + node.pem, node.key_pem), "a")
    assert caught.value.hint == "the node's certificate comes first of the 2 in the file"
    alone = make("a", root, ca=False)
    with pytest.raises(ConfigError, match=r"does not belong to the certificate .*node\.pem$"):
        load(write(tmp_path, root.pem, alone.pem, between.key_pem), "a")


def test_a_device_or_a_folder_is_no_file(authority: TestAuthority) -> None:
    files = authority.issue("a")
    for path in ("/dev/zero", str(authority.folder)):
        with pytest.raises(ConfigError, match="is no file"):
            FileCredentials(replace(files, key=path), "a")


def test_certificates_that_peers_would_refuse(authority: TestAuthority, tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError, match="certificate has expired"):
        FileCredentials(authority.issue("a", days=-1), "a")
    with pytest.raises(AuthenticationError, match="not yet valid"):
        FileCredentials(authority.issue("a", begins_in=timedelta(days=2)), "a")
    other = TestAuthority.make(tmp_path / "theirs")
    with pytest.raises(AuthenticationError, match="unable to get local issuer"):
        FileCredentials(replace(authority.issue("a"), ca=str(other.folder / "ca.pem")), "a")
    with pytest.raises(ConfigError, match="does not belong to the certificate"):
        FileCredentials(replace(authority.issue("a"), key=authority.issue("b").key), "a")


def test_the_certificate_must_have_the_name_of_the_node(authority: TestAuthority) -> None:
    FileCredentials(authority.issue("b", "a"), "a")
    for names in (("b",), ("A",), ("a.cluster",)):
        with pytest.raises(AuthenticationError, match=f"is for {names[0]}, and this agent is called 'a'"):
            FileCredentials(authority.issue(*names), "a")


def _settings(authority: TestAuthority, node: str = "a") -> Settings:
    files = authority.issue(node)
    return Settings(security=Security(mode="mtls", ca=files.ca, certificate=files.certificate, key=files.key))


def test_a_reload_takes_new_files_and_a_broken_one_changes_nothing(authority: TestAuthority) -> None:
    settings = _settings(authority)
    credentials = authority.credentials("a")
    old = credentials.context(listening=True)
    credentials.prepare(settings)()
    assert credentials.context(listening=True) is not old  # the same files, but they were asked for
    current = credentials.context(listening=True)
    Path(settings.security.key).write_text("nothing")
    with pytest.raises(ConfigError, match="does not hold a key"):
        credentials.prepare(settings)
    assert credentials.context(listening=True) is current
    authority.issue("a", days=100)
    ends = credentials.expires
    credentials.prepare(settings)()
    assert credentials.expires > ends + 60 * 86400


def test_files_that_change_are_taken_and_broken_ones_are_told_of_once(
    authority: TestAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    credentials = authority.credentials("a")
    assert credentials.look() is None
    files = authority.issue("a", days=50)
    use = credentials.look()
    assert use is not None
    use()
    assert credentials.look() is None
    current = credentials.context(listening=False)
    Path(files.certificate).write_text("nothing")
    caplog.clear()
    assert credentials.look() is None
    assert credentials.look() is None
    (record,) = caplog.records
    assert "event=certificate_not_taken in_force=old" in record.message
    Path(files.ca).unlink()
    assert credentials.look() is None
    assert credentials.context(listening=False) is current


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _lines(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if f"event={event} " in record.getMessage()]


def test_a_mode_that_is_mended_is_noticed(authority: TestAuthority, caplog: pytest.LogCaptureFixture) -> None:
    credentials = authority.credentials("a")
    files = authority.issue("a", days=50)
    Path(files.key).chmod(0o644)
    assert credentials.look() is None
    (line,) = _lines(caplog, "certificate_not_taken")
    assert f"chmod 600 {files.key}" in line
    Path(files.key).chmod(0o600)
    use = credentials.look()
    assert use is not None
    use()
    assert credentials.look() is None
    assert len(_lines(caplog, "certificate_changed")) == 1


def test_a_mode_that_is_spoilt_is_noticed_and_no_change_of_the_certificate(
    authority: TestAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue("a")
    credentials = FileCredentials(files, "a")
    Path(files.key).chmod(0o644)
    assert credentials.look() is None
    assert "others may use the key" in _lines(caplog, "certificate_not_taken")[0]
    Path(files.key).chmod(0o400)
    use = credentials.look()
    assert use is not None
    use()
    assert credentials.look() is None
    assert _lines(caplog, "certificate_changed") == []  # it is the same one


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    authority: TestAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = authority.issue("a")
    checked: list[str] = []

    def check_private(what: str, path: object, descriptor: int) -> None:
        checked.append(what)
        if len(checked) == 1:  # by now all files are open
            new = Path(files.ca).with_name("new.pem")
            new.write_bytes(Path(files.ca).read_bytes())
            new.replace(files.ca)

    monkeypatch.setattr("allreduced.daemon.certificate_files.check_private", check_private)
    credentials = FileCredentials(files, "a")
    assert credentials.look() is not None
    assert checked == ["the key"] * 2


def test_a_certificate_that_is_not_valid_yet_is_tried_until_it_is(
    authority: TestAuthority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    credentials = FileCredentials(authority.issue("a"), "a", clock)
    authority.issue("a", begins_in=timedelta(days=2))
    for _ in range(3):
        clock.now += 10
        assert credentials.look() is None
    (line,) = _lines(caplog, "certificate_not_taken")
    assert "not yet valid" in line
    clock.now += 86400 - 21  # since the first time
    assert credentials.look() is None
    assert len(_lines(caplog, "certificate_not_taken")) == 1
    clock.now += 1
    assert credentials.look() is None
    assert len(_lines(caplog, "certificate_not_taken")) == 2
    valid = load(authority.issue("b", "a"), "a")

    def two_days_later(files: CertificateFiles, node: str) -> Loaded:
        return replace(valid, files=files)

    monkeypatch.setattr("allreduced.daemon.credentials.load", two_days_later)
    use = credentials.look()
    assert use is not None
    use()
    assert credentials.context(listening=True) is valid.listening


def test_another_complaint_is_told_and_so_is_one_that_comes_back(
    authority: TestAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue("a")
    credentials = FileCredentials(files, "a", Clock())
    aside = Path(files.ca).with_name("aside.pem")
    Path(files.ca).rename(aside)
    for _ in range(2):
        assert credentials.look() is None
    (line,) = _lines(caplog, "certificate_not_taken")
    assert "security.ca: " in line
    assert "cannot be read: No such file" in line
    Path(files.ca).write_text("nothing")
    for _ in range(2):
        assert credentials.look() is None
    assert "does not hold certificates" in _lines(caplog, "certificate_not_taken")[1]
    aside.replace(files.ca)
    use = credentials.look()
    if use is not None:  # the renaming is a change of the file
        use()
    assert credentials.look() is None
    Path(files.ca).write_text("nothing")
    assert credentials.look() is None
    assert len(_lines(caplog, "certificate_not_taken")) == 3
    assert _lines(caplog, "certificate_changed") == []


async def test_a_defect_does_not_end_the_looking(
    authority: TestAuthority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    used = asyncio.Event()
    looks = 0

    def look() -> Callable[[], None]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise ValueError("a defect")
        return used.set

    monkeypatch.setattr("allreduced.daemon.credentials.LOOK_EVERY", 0.0)
    credentials = authority.credentials("a")
    monkeypatch.setattr(credentials, "look", look)
    watching = asyncio.create_task(credentials.watch())
    async with asyncio.timeout(20):
        await used.wait()
    watching.cancel()
    await asyncio.wait([watching])
    assert "event=defect handling=certificates" in caplog.text


def test_the_end_does_not_wait_for_a_look_at_the_files(
    authority: TestAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, told = threading.Event(), threading.Event()

    def look() -> None:
        begun.set()
        assert told.wait(20)

    monkeypatch.setattr("allreduced.daemon.credentials.LOOK_EVERY", 0.0)
    credentials = authority.credentials("a")
    monkeypatch.setattr(credentials, "look", look)

    async def give_up() -> None:
        watching = asyncio.create_task(credentials.watch())
        while not begun.is_set():  # noqa: ASYNC110 # a thread sets it
            await asyncio.sleep(0)
        watching.cancel()
        await asyncio.wait([watching])

    asyncio.run(give_up())
    assert not told.is_set()
    told.set()


def test_an_end_that_is_near_is_told(authority: TestAuthority, caplog: pytest.LogCaptureFixture) -> None:
    FileCredentials(authority.issue("a", days=30), "a")
    assert not caplog.records
    FileCredentials(authority.issue("a", days=3), "a")
    assert "event=certificate_expires" in caplog.text
    assert "subject='a' days=3.0" in caplog.text


def test_an_authority_that_ends_first_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = make("of the site", days=5)
    node = make("a", root, days=90, ca=False)
    files = write(tmp_path, root.pem, node.pem, node.key_pem)
    FileCredentials(files, "a")
    (line,) = _lines(caplog, "certificate_expires")
    assert f"file={files.ca} subject='of the site' days=5.0 hint='put a new authority into security.ca" in line


async def test_an_end_that_is_near_is_told_once_a_day(
    authority: TestAuthority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    credentials = FileCredentials(authority.issue("a", days=3), "a", clock)
    assert len(_lines(caplog, "certificate_expires")) == 1
    told: list[int] = []
    steps = iter([10.0, 10.0, 86400.0 - 21.0, 1.0, 10.0, 86400.0 - 10.0])
    over = asyncio.Event()

    def look() -> None:
        told.append(len(_lines(caplog, "certificate_expires")))
        step = next(steps, None)
        if step is None:
            over.set()
        else:
            clock.now += step

    monkeypatch.setattr("allreduced.daemon.credentials.LOOK_EVERY", 0.0)
    monkeypatch.setattr(credentials, "look", look)
    watching = asyncio.create_task(credentials.watch())
    async with asyncio.timeout(20):
        await over.wait()
    watching.cancel()
    await asyncio.wait([watching])
    assert told[:7] == [1, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("missing", ["ca", "certificate", "key"])
def test_all_files_are_needed(missing: str) -> None:
    security = Security(mode="mtls", ca="c", certificate="d", key="k")
    assert files_of(security) is not None
    with pytest.raises(ConfigError) as caught:
        files_of(msgspec.structs.replace(security, **{missing: ""}))
    assert caught.value.path == f"security.{missing}"


def test_files_without_the_mode_are_a_mistake() -> None:
    assert files_of(Security()) is None
    with pytest.raises(ConfigError, match="TLS is not on") as caught:
        files_of(Security(certificate="x"))
    assert caught.value.hint == 'security.mode = "mtls"'


def test_an_encrypted_key_is_refused_without_asking(authority: TestAuthority) -> None:
    from cryptography.hazmat.primitives import serialization

    files = authority.issue("a")
    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    Path(files.key).write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    with pytest.raises(ConfigError, match="cannot ask for its password"):
        FileCredentials(files, "a")
