"""Who else may use a file with a secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allreduced.core.errors import AuthenticationError
from allreduced.daemon.private_file import check_private, too_open

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
