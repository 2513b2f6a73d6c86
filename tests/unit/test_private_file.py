"""Who else may use a file with a secret."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.other_user import STRANGER, as_user, only_root

from allreduced.core.errors import AuthenticationError, ConfigError
from allreduced.daemon.certificate_files import CertificateFiles
from allreduced.daemon.certificate_files import load as load_certificates
from allreduced.daemon.private_file import check_private, too_open
from allreduced.daemon.settings import secret_bytes
from allreduced.daemon.settings_reader import load, parse

ROOT, SOMEBODY = 0, 10001


@pytest.mark.parametrize(
    ("owner", "mode", "who"),
    [
        (SOMEBODY, 0o600, ""),
        (SOMEBODY, 0o400, ""),
        (SOMEBODY, 0o640, "its group"),
        (SOMEBODY, 0o440, "its group"),
        (SOMEBODY, 0o620, "its group"),
        (SOMEBODY, 0o604, "others"),
        (ROOT, 0o600, ""),
        (ROOT, 0o640, ""),  # root:fsGroup, as Kubernetes makes it, and what packages install
        (ROOT, 0o440, ""),
        (ROOT, 0o660, "its group"),
        (ROOT, 0o650, "its group"),
        (ROOT, 0o644, "others"),
        (ROOT, 0o444, "others"),
        (ROOT, 0o642, "others"),
        (ROOT, 0o641, "others"),
    ],
)
def test_only_root_lets_a_group_read(owner: int, mode: int, who: str) -> None:
    assert too_open(mode, owner) == who


def test_the_error_tells_who_may_and_what_mends_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("s")
    file.chmod(0o644)
    with file.open() as opened, pytest.raises(AuthenticationError) as caught:
        check_private("the secret file", file, opened.fileno())
    assert caught.value.message == f"others may use the secret file {file} (mode 644)"
    assert caught.value.hint == f"chmod 600 {file}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_kubelet_mounts_is_read_and_what_a_user_opens_to_the_group_is_not(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("s")
    file.chmod(0o440)
    with file.open() as opened:
        os.fchown(opened.fileno(), 0, SOMEBODY)
        check_private("the secret file", file, opened.fileno())
        os.fchown(opened.fileno(), SOMEBODY, SOMEBODY)
        with pytest.raises(AuthenticationError, match="its group may use"):
            check_private("the secret file", file, opened.fileno())


def _configuration(path: Path) -> object:
    return load(str(path), {})


def _secret(path: Path) -> object:
    return secret_bytes(parse(None, "", {}, {"security.secret_file": str(path)}))


def _key(path: Path) -> object:
    return load_certificates(CertificateFiles(str(path), str(path), str(path)), "a")


@only_root
@pytest.mark.parametrize(
    ("read", "says"),
    [(_configuration, "the configuration"), (_secret, "the secret file"), (_key, r"security\.ca:")],
)
def test_what_lets_the_agent_read_a_file(open_folder: Path, read: Callable[[Path], object], says: str) -> None:
    file = open_folder / "file"
    file.write_text("")
    file.chmod(0o600)
    with as_user(STRANGER), pytest.raises(ConfigError, match=f"{says} .*{file} cannot be read: Permission") as caught:
        read(file)
    assert caught.value.hint == f"give it to the user of the agent: chown {STRANGER} {file}"
    closed = open_folder / "closed"
    closed.mkdir(0o700)
    (closed / "deeper").mkdir()
    with as_user(STRANGER), pytest.raises(ConfigError, match=f"{says} .*cannot be read: Permission") as caught:
        read(closed / "deeper" / "file")
    assert caught.value.hint == f"{STRANGER} may not enter {closed}: put the file where it may, such as /etc/allreduced"
    with pytest.raises(ConfigError, match=f"{says} .*cannot be read: No such file") as caught:
        read(closed / "file")
    assert caught.value.hint == ""


def test_a_pipe_that_nobody_writes_to_is_an_empty_secret(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="is empty"):
        _secret(tmp_path / "pipe")
