"""Settings with which an agent does not start are refused before, by all who could know."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.certificates import TestAuthority
from tests.support.other_user import STRANGER, as_user, only_root

from allreduced.cli.main import main
from allreduced.core.errors import AllReducedError, AuthenticationError, ConfigError
from allreduced.daemon.agent import AgentOptions, run_agent
from allreduced.daemon.parts import assemble
from allreduced.daemon.settings import Settings
from allreduced.daemon.settings_reader import load, parse
from allreduced.daemon.socket_path import bind_socket
from allreduced.daemon.start_check import check_start, node_of, refusals

HOST = socket.gethostname()
LISTEN = '[peers]\nlisten = "tcp://127.0.0.1:0"\n'

REFUSED = {
    "itself": (
        f'{LISTEN}[[peers.static]]\nnode = "{HOST}"\naddress = "tcp://127.0.0.1:9"\n',
        f"{HOST!r} is listed among the peers, and is this agent itself",
    ),
    "user": ('[access]\nusers = ["nosuch"]\n', "access.users names 'nosuch', and there is no such user"),
    "group": ('[access]\ngroups = ["nosuch"]\n', "access.groups names 'nosuch', and there is no such group"),
    "socket group": ('[access]\nsocket_group = "nosuch"\n', "access.socket_group names 'nosuch'"),
    "secret": ('[security]\nsecret_file = "/no/such/file"\n', "the secret file /no/such/file cannot be read"),
    "certificate": (
        '[security]\nmode = "mtls"\nca = "/no/such/ca"\ncertificate = "/no/such/pem"\nkey = "/no/such/key"\n',
        "security.ca: /no/such/ca cannot be read",
    ),
    "cpus": ("[engine]\ncpus = [999]\n", "engine: the reduction threads cannot be started"),
    "address": (
        '[peers]\nlisten = "tcp://192.0.2.1:0"\n[security]\ninsecure = true\n',
        "cannot listen at tcp://192.0.2.1:0: this machine does not have that address",
    ),
    "interface": (
        '[peers]\nlisten = "tcp://[fe80::1%nosuch0]:0"\n[security]\ninsecure = true\n',
        "this machine has no interface 'nosuch0'",
    ),
    "open": ('[peers]\nlisten = "tcp://0.0.0.0:0"\n', "can be reached from other machines, and there is no shared"),
    "loopback": (
        f'{LISTEN}[[peers.static]]\nnode = "other"\naddress = "tcp://192.0.2.7:9"\n',
        "which is themselves; tcp://192.0.2.7:9 is another machine",
    ),
    "socket folder": ('socket = "{tmp}/no/such/agent.sock"\n', "/no/such/agent.sock: No such file or directory"),
    "no socket": ('socket = "{tmp}/agent.toml"\n', "/agent.toml exists and is not a socket"),
    "metrics": (
        '[metrics]\nlisten = "192.0.2.1:4124"\n',
        "metrics cannot be served at 192.0.2.1:4124: no interface of this machine has that address",
    ),
}
"""What a start refuses, and how."""


@pytest.fixture(params=REFUSED)
def refused(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """Write settings of an agent that does not start; return the file and what the start says."""
    for name in [name for name in os.environ if name.startswith("ALLREDUCED_")]:
        monkeypatch.delenv(name)
    text, words = REFUSED[request.param]
    file = tmp_path / "agent.toml"
    if not text.startswith("socket = "):
        text = f'socket = "{{tmp}}/agent.sock"\n{text}'
    file.write_text(f"[agent]\n{text.replace('{tmp}', str(tmp_path))}")
    return file, words


def told(error: AllReducedError) -> str:
    return re.sub(r"(127\.0\.0\.1):\d+", r"\1:PORT", str(error))  # the start has one, the check has not


def raised(call: Callable[[], object]) -> AllReducedError:
    with pytest.raises(AllReducedError) as caught:
        call()
    return caught.value


@pytest.mark.usefixtures("root_logger")
def test_the_check_says_what_the_start_says(refused: tuple[Path, str]) -> None:
    file, words = refused
    settings = load(str(file), {})
    started = raised(lambda: run_agent(settings, AgentOptions(), {}))
    checked = raised(lambda: check_start(node_of(settings), settings))
    assert words in started.message
    assert (type(checked), told(checked)) == (type(started), told(started))


def test_the_command_says_so_and_fails(refused: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    file, words = refused
    assert main(["agent", "--config", str(file), "--check", "--quiet"]) != 0
    written = capsys.readouterr()
    assert (written.out, words in written.err) == ("", True), written.err


def test_what_an_agent_starts_with_is_not_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    secret.chmod(0o600)
    text = (
        f'[agent]\nnode = "a"\n[security]\nsecret_file = "{secret}"\n[access]\nusers = ["*"]\n'
        f"socket_group = '{os.getegid()}'\n[engine]\nthreads = 1\ncpus = [{min(os.sched_getaffinity(0))}]\n"
        '[metrics]\nlisten = "127.0.0.1:0"\n[peers]\nlisten = "tcp://0.0.0.0:0"\n'
        '[[peers.static]]\nnode = "b"\naddress = "tcp://127.0.0.1:9"\n'
    )
    assert list(refusals("a", parse(text, "", {}, {}))) == []


def test_the_certificate_of_another_node_is_refused(tmp_path: Path) -> None:
    files = TestAuthority.make(tmp_path).issue("b")
    text = f'[security]\nmode = "mtls"\nca = "{files.ca}"\ncertificate = "{files.certificate}"\nkey = "{files.key}"\n'
    settings = parse(text, "", {}, {})
    assert list(refusals("b", settings)) == []
    (error,) = refusals("a", settings)
    assert isinstance(error, AuthenticationError)
    assert "is for b, and this agent is called 'a'" in error.message


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    secret.chmod(0o644)
    error = raised(lambda: check_start("a", parse(None, "", {}, {"security.secret_file": str(secret)})))
    assert error.message == f"others may use the secret file {secret} (mode 644)"


@only_root
def test_a_group_that_this_user_may_not_give_is_refused() -> None:
    settings = parse(None, "", {}, {"access.socket_group": "4322"})
    assert list(refusals("a", settings)) == []
    with as_user(STRANGER):
        (error,) = refusals("a", settings)
    assert isinstance(error, ConfigError)
    assert error.path == "access.socket_group"
    assert error.message == "the socket cannot be given to the group with gid 4322: Operation not permitted"


@only_root
@pytest.mark.parametrize("place", ["agent.sock", "deeper/agent.sock"])
def test_a_socket_that_this_user_may_not_make_is_refused(open_folder: Path, place: str) -> None:
    name = str(open_folder / place)
    settings = parse(None, "", {}, {"agent.socket": name})
    with as_user(STRANGER):
        (error,) = refusals("a", settings)
        bound = raised(lambda: bind_socket(name))
        assert list(refusals("a", settings, had=settings)) == []
    assert (error.message, error.hint) == (bound.message, bound.hint)
    assert ": Permission denied" in error.message


def test_a_socket_that_is_there_is_no_matter_of_the_settings(tmp_path: Path) -> None:
    place = tmp_path / "agent.sock"
    settings = parse(None, "", {}, {"agent.socket": str(place)})
    assert list(refusals("a", settings)) == []
    assert not place.exists()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(place))
    assert list(refusals("a", settings)) == []


def test_a_port_that_is_in_use_is_no_matter_of_the_settings() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        text = f'[peers]\nlisten = "tcp://127.0.0.1:{port}"\n[metrics]\nlisten = "127.0.0.1:{port}"\n'
        assert list(refusals("a", parse(text, "", {}, {}))) == []


def test_all_reasons_are_told() -> None:
    text = '[access]\nusers = ["nosuch"]\nsocket_group = "nosuch"\n[engine]\ncpus = [999]\n'
    found = [error.path for error in refusals("a", parse(text, "", {}, {})) if isinstance(error, ConfigError)]
    assert found == ["access.users", "access.socket_group", "engine"]


@pytest.mark.parametrize("name", ["cpus", "address", "interface", "metrics"])
def test_what_a_running_agent_has_need_not_be_there_at_the_moment(name: str) -> None:
    settings = parse(REFUSED[name][0], "", {}, {})
    assert list(refusals("a", settings, had=settings)) == []
    assert len(list(refusals("a", settings, had=Settings()))) == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [("a\nb", r"'a\nb' has control characters"), ("a\udcff", r"'a\udcff' is no UTF-8"), ("é" * 200, "has 400 bytes")],
)
def test_a_host_whose_name_no_agent_can_have(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    with pytest.raises(ConfigError) as caught:
        check_start(node_of(Settings()), Settings())
    assert caught.value.path == "agent.node"
    assert caught.value.message.startswith("the name of this host: ")
    assert says in caught.value.message


def test_a_start_uses_what_its_check_has_read(tmp_path: Path) -> None:
    files = TestAuthority.make(tmp_path).issue("a")
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    secret.chmod(0o600)
    text = f'[security]\nmode = "mtls"\nca = "{files.ca}"\ncertificate = "{files.certificate}"\nkey = "{files.key}"\n'
    settings = parse(f'{text}secret_file = "{secret}"\n[engine]\nthreads = 1\n', "", {}, {})
    read = check_start("a", settings)
    for path in (files.ca, files.certificate, files.key, secret):
        Path(path).unlink()  # so nobody reads them again
    parts = assemble("a", settings, read)
    try:
        assert parts.secret == read.secret == b"x" * 32
        assert read.certificates is not None
        assert parts.credentials is not None
        assert parts.credentials.context(listening=True) is read.certificates.listening
    finally:
        parts.kernels.close()
