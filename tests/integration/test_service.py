"""Real agents as a service manager runs them: what they tell it, reload at SIGHUP, a socket that is handed over."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.integration.agents import NotStarted, StartAgent
from tests.integration.test_links import until_logged
from tests.support.pair import pair

from allreduced.client import AsyncCommunicator, connect
from allreduced.core.errors import AllReducedError, ConfigError, LimitExceeded

BOUND = 60.0
"""Seconds in which everything must have happened; what is waited for takes milliseconds."""

LISTEN = '[peers]\nlisten = "tcp://127.0.0.1:0"\n'

HAND_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.set_inheritable(3, True)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "clients"}
os.execv(sys.argv[2], sys.argv[2:])
"""
"""What a service manager does before it starts an agent: the socket becomes descriptor 3 of the same process."""


CLOSED = ("sh", "-c", 'exec "$@" 2>&-', "sh")
FULL = ("sh", "-c", 'exec "$@" 2>/dev/full', "sh")
UNREAD = (
    *(sys.executable, "-c"),
    "import os, sys\nout, err = os.pipe()\nos.dup2(err, 2)\nos.close(out)\nos.execv(sys.argv[1], sys.argv[1:])",
)
"""What stands before a command whose standard error takes nothing."""

AGENT = (sys.executable, "-P", "-m", "allreduced.cli.main", "agent")


class Manager:
    """Hears what an agent tells."""

    def __init__(self) -> None:
        self.name = f"@allreduced-test-{secrets.token_hex(8)}"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(f"\0{self.name[1:]}")
        self._sock.settimeout(BOUND)

    def until(self, line: str) -> dict[str, str]:
        """Wait for a message with this beginning of a line, and return its lines."""
        while True:
            lines = self._sock.recv(4096).decode().split("\n")
            if any(told.startswith(line) for told in lines):
                return dict(told.split("=", 1) for told in lines)

    def silent(self) -> bool:
        """Return whether nothing is there that was not heard."""
        return not select.select([self._sock], [], [], 0)[0]

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def manager() -> Iterator[Manager]:
    manager = Manager()
    yield manager
    manager.close()


@pytest.fixture(autouse=True)
def hang_ups_are_heard() -> Iterator[None]:
    """Let agents hear SIGHUP where the tests themselves run under nohup, whose choice they would inherit."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)  # what is caught here is back to its default in a child
    yield
    signal.signal(signal.SIGHUP, before)


async def sums(sockets: list[str], job: str) -> list[float]:
    """Reduce 1, 2, … over one rank at each socket."""
    ranks = await asyncio.gather(
        *(
            AsyncCommunicator.connect(
                job=job, rank=rank, size=len(sockets), local_rank=0, local_size=1, socket=name, deadline=BOUND
            )
            for rank, name in enumerate(sockets)
        )
    )
    works = [rank.all_reduce(np.full(3, number + 1.0), deadline=BOUND) for number, rank in enumerate(ranks)]
    results = [float(result[0]) for result in await asyncio.gather(*works)]
    for rank in ranks:
        await rank.close()
    return results


def test_a_life_as_the_service_manager_hears_of_it(
    start_agent: StartAgent, manager: Manager, tmp_path: Path, free_port: int
) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(f'{LISTEN}[[peers.static]]\nnode = "b"\naddress = "tcp://127.0.0.1:{free_port}"\n')
    agent = start_agent("a", "--config", str(config), NOTIFY_SOCKET=manager.name, WATCHDOG_USEC="600000")
    ready = manager.until("READY=1")
    # It was tried to reach the peer by then: the first round is over.
    assert ready["STATUS"] == "serving; clients: 0; operations in flight: 0; agents connected: 0, not reached: b"
    assert manager.until("WATCHDOG=1") == {"WATCHDOG": "1"}
    agent.process.send_signal(signal.SIGTERM)
    stopping = manager.until("STOPPING=1")
    assert int(stopping["EXTEND_TIMEOUT_USEC"]) == 25_000_000  # drain, farewell to peers, and the rest
    assert agent.wait() == 0


async def test_a_reload_finds_a_new_peer(start_agent: StartAgent, manager: Manager, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(LISTEN)
    a = start_agent("a", "--config", str(config), NOTIFY_SOCKET=manager.name)
    b = start_agent("b", "--listen", "tcp://127.0.0.1:0")
    manager.until("READY=1")
    config.write_text(
        f'[agent]\nlog_level = "info"\n{LISTEN}flows = 3\n[[peers.static]]\nnode = "b"\naddress = "{b.listen}"\n'
    )
    a.process.send_signal(signal.SIGHUP)
    assert int(manager.until("RELOADING=1")["MONOTONIC_USEC"]) > 0
    # What waits for a restart is told; the peer is there without one.
    assert manager.until("READY=1")["STATUS"].startswith("restart needed for peers.flows; serving;")
    manager.until(
        "STATUS=restart needed for peers.flows; serving; clients: 0; operations in flight: 0; agents connected: 1"
    )
    assert await sums([a.socket, b.socket], "job") == [3.0, 3.0]
    await until_logged(a, " event=reloaded ")
    logged = a.logged()
    assert f"event=setting_changed setting=peers.static old='-' new='b={b.listen}'" in logged
    assert "event=setting_changed setting=agent.log_level old='warning' new='info'" in logged
    assert "event=restart_needed setting=peers.flows in_force='2' new='3'" in logged
    assert " INFO " in logged


async def test_limits_of_a_reload_hold_from_then_on(start_agent: StartAgent, manager: Manager, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(f"[limits]\npeers = 1\n{LISTEN}")
    a = start_agent("a", "--config", str(config), NOTIFY_SOCKET=manager.name)
    b = start_agent("b", "--listen", "tcp://127.0.0.1:0", "--peer", f"a={a.listen}")
    assert await sums([a.socket, b.socket], "two") == [3.0, 3.0]
    c = start_agent("c", "--listen", "tcp://127.0.0.1:0", "--peer", f"a={a.listen}")
    await until_logged(a, "has links to 1 agents, the most that it allows (limits.peers)")
    manager.until("READY=1")

    def reload(limits: str) -> None:
        config.write_text(f"[limits]\n{limits}\n{LISTEN}")
        a.process.send_signal(signal.SIGHUP)
        manager.until("RELOADING=1")
        manager.until("READY=1")

    reload("peers = 2")
    assert await sums([a.socket, b.socket, c.socket], "three") == [6.0, 6.0, 6.0]
    comm = connect(job="job", rank=0, size=1, local_rank=0, local_size=1, socket=a.socket, deadline=BOUND)
    big = np.ones(3 << 20, "uint8")
    with comm:
        assert comm.all_reduce(big, deadline=BOUND).sum() == big.size
        reload('clients = 1\narena_bytes_per_user = "1MiB"\noperations = 3')
        with pytest.raises(LimitExceeded) as caught:
            connect(job="other", rank=0, size=1, local_rank=0, local_size=1, socket=a.socket, deadline=BOUND)
        assert caught.value.limit == "limits.clients"
    reload('arena_bytes_per_user = "1MiB"\noperations = 3')
    first, second = await asyncio.gather(
        *(
            AsyncCommunicator.connect(
                job="pair", rank=rank, size=2, local_rank=rank, local_size=2, socket=a.socket, deadline=BOUND
            )
            for rank in range(2)
        )
    )
    with pytest.raises(LimitExceeded) as caught:
        await first.all_reduce(big, name="big", deadline=BOUND)
    assert caught.value.limit == "limits.arena_bytes_per_user"
    works = [first.all_reduce(np.ones(2), name=f"small {number}", deadline=BOUND) for number in range(4)]
    with pytest.raises(LimitExceeded) as caught:
        await works[3]
    assert caught.value.limit == "limits.operations"
    theirs = [second.all_reduce(np.ones(2), name=f"small {number}", deadline=BOUND) for number in range(3)]
    for result in await asyncio.gather(*works[:3], *theirs):
        assert result.tolist() == [2.0, 2.0]
    await asyncio.gather(first.close(), second.close())


async def test_a_broken_file_changes_nothing_and_the_job_goes_on(
    start_agent: StartAgent, manager: Manager, tmp_path: Path
) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("[limits]\nclients = 2\n")
    agent = start_agent("a", "--config", str(config), NOTIFY_SOCKET=manager.name)
    comm = connect(job="job", rank=0, size=1, local_rank=0, local_size=1, socket=agent.socket, deadline=BOUND)
    for broken, said in [
        ("[limits]\nclients = 0\n", "$.limits.clients is 0"),
        ("[limits\n", "is no TOML"),
        ("version = 9\n", "the configuration is of version 9"),
        # An agent would not start with these.
        ('[access]\ngroups = ["nosuch"]\n', "access.groups names 'nosuch'"),
        ("[engine]\ncpus = [999]\n", "the reduction threads cannot be started"),
        ('[security]\nsecret_file = "/no/such/file"\n', "the secret file /no/such/file cannot be read"),
        ('[metrics]\nlisten = "192.0.2.1:4124"\n', "metrics cannot be served at 192.0.2.1:4124"),
        ('[peers]\nlisten = "tcp://0.0.0.0:0"\n', "and there is no shared secret"),
    ]:
        config.write_text(broken)
        agent.process.send_signal(signal.SIGHUP)
        manager.until("RELOADING=1")
        status = manager.until("READY=1")["STATUS"]
        assert status.startswith("reload failed, the settings from before are in force: ")
        assert said in status
        await until_logged(agent, said)
        assert comm.all_reduce(np.ones(2), deadline=BOUND).tolist() == [1.0, 1.0]
    config.unlink()
    agent.process.send_signal(signal.SIGHUP)
    assert "cannot be read" in manager.until("STATUS=reload failed")["STATUS"]
    config.write_text("[limits]\nclients = 2\n")
    agent.process.send_signal(signal.SIGHUP)
    manager.until("STATUS=serving")
    comm.close()
    assert agent.stop() == 0


def test_a_reload_with_which_the_agent_would_be_its_own_peer_changes_nothing(
    start_agent: StartAgent, manager: Manager, tmp_path: Path
) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(LISTEN)
    agent = start_agent("a", "--node", "", "--config", str(config), NOTIFY_SOCKET=manager.name)
    manager.until("READY=1")
    host = socket.gethostname()
    config.write_text(f'{LISTEN}[[peers.static]]\nnode = "{host}"\naddress = "tcp://127.0.0.1:9"\n')
    agent.process.send_signal(signal.SIGHUP)
    manager.until("RELOADING=1")
    status = manager.until("READY=1")["STATUS"]
    assert status.startswith(
        f"reload failed, the settings from before are in force: {host!r} is listed among the peers, and is this agent"
    )
    assert agent.stop() == 0
    assert "setting_changed" not in agent.logged()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[engine]\nthread = 1\n", "$.engine.thread: unknown key 'thread'"),
        ("version = 2\n", "the configuration is of version 2"),
        ("[limits\n", "is no TOML"),
        ('[peers]\nlisten = "tcp://192.0.2.1:0"\n', "192.0.2.1"),
    ],
)
def test_why_a_start_failed_is_told_once(
    start_agent: StartAgent, manager: Manager, tmp_path: Path, text: str, said: str
) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(text)
    with pytest.raises(NotStarted) as caught:
        start_agent("a", "--config", str(config), NOTIFY_SOCKET=manager.name, ALLREDUCED_INSECURE="1")
    assert caught.value.status == 2
    told = manager.until("STATUS=")
    assert list(told) == ["STATUS"]
    assert told["STATUS"].startswith("not started: ")
    assert said in told["STATUS"]
    assert manager.silent()


def test_a_check_tells_the_service_manager_nothing(manager: Manager, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("version = 2\n")
    command = [*AGENT, "--config", str(config), "--check"]
    done = subprocess.run(command, env={**os.environ, "NOTIFY_SOCKET": manager.name}, capture_output=True, check=False)
    assert done.returncode == 2
    assert manager.silent()


def test_a_file_whose_name_is_no_utf_8_is_read_again_and_the_agent_ends_in_order(
    start_agent: StartAgent, manager: Manager, tmp_path: Path
) -> None:
    config = tmp_path / os.fsdecode(b"c\xffg.toml")
    config.write_text("")
    agent = start_agent("a", "--config", str(config), NOTIFY_SOCKET=manager.name)
    manager.until("READY=1")
    config.write_text("[limits\n")
    agent.process.send_signal(signal.SIGHUP)
    manager.until("RELOADING=1")
    assert "/c\\udcffg.toml is no TOML" in manager.until("READY=1")["STATUS"]
    agent.process.send_signal(signal.SIGTERM)
    assert "/c\\udcffg.toml is no TOML" in manager.until("STOPPING=1")["STATUS"]
    assert agent.wait() == 0
    assert "Traceback" not in agent.logged()


def test_a_pipe_in_the_place_of_the_file_fails_a_reload_and_a_file_is_read_again(
    start_agent: StartAgent, manager: Manager, tmp_path: Path
) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("")
    agent = start_agent("a", "--config", str(config), NOTIFY_SOCKET=manager.name)
    config.unlink()
    os.mkfifo(config)
    agent.process.send_signal(signal.SIGHUP)
    manager.until("RELOADING=1")
    said = f"the configuration {config} cannot be read again: it is no regular file"
    assert said in manager.until("READY=1")["STATUS"]
    assert agent.says(said)
    config.unlink()
    config.write_text("[limits]\nclients = 5\n")
    agent.process.send_signal(signal.SIGHUP)
    manager.until("RELOADING=1")
    assert manager.until("READY=1")["STATUS"].startswith("serving")
    assert agent.stop() == 0


async def test_a_hang_up_without_a_file_ends_the_agent_in_order(
    start_agent: StartAgent, manager: Manager, tmp_path: Path
) -> None:
    path = tmp_path / "agent.sock"
    environ = {"NOTIFY_SOCKET": manager.name, "ALLREDUCED_AGENT_LOG_LEVEL": "info"}
    agent = start_agent("a", "--socket", str(path), **environ)
    async with pair(str(path)) as (first, second):
        work = asyncio.ensure_future(first.all_reduce(np.ones(2), name="x", deadline=BOUND))
        manager.until("STATUS=serving; clients: 2; operations in flight: 1")
        agent.process.send_signal(signal.SIGHUP)
        manager.until("STOPPING=1")
        agent.process.send_signal(signal.SIGHUP)  # the shell's, after the terminal's: no reason to stop at once
        await second.close()  # so the operation ends, and the agent with it
        with pytest.raises(AllReducedError):
            await work
    assert agent.wait() == 0
    assert not path.exists()
    assert agent.logged().count(" event=stopping ") == 1


def test_a_terminal_that_is_closed_ends_the_agent_in_order(manager: Manager, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("")
    path = tmp_path / "agent.sock"
    ours, theirs = os.openpty()
    try:
        process = subprocess.Popen(
            [*AGENT, "--config", str(config), "--socket", str(path)],
            env={**os.environ, "NOTIFY_SOCKET": manager.name},
            stdin=theirs,
            stderr=subprocess.DEVNULL,
        )
    finally:
        os.close(theirs)
    with process:
        try:
            manager.until("READY=1")
            process.send_signal(signal.SIGHUP)
            assert process.wait(BOUND) == 0
            assert not path.exists()
        finally:
            process.kill()
            os.close(ours)


def test_an_agent_under_nohup_outlives_its_terminal(start_agent: StartAgent) -> None:
    agent = start_agent("a", prefix=("sh", "-c", 'trap "" HUP; exec "$@"', "sh"), ALLREDUCED_AGENT_LOG_LEVEL="info")
    agent.process.send_signal(signal.SIGHUP)
    comm = connect(job="job", rank=0, size=1, local_rank=0, local_size=1, socket=agent.socket, deadline=BOUND)
    assert comm.all_reduce(np.ones(2), deadline=BOUND).tolist() == [1.0, 1.0]
    comm.close()
    assert " event=stopping " not in agent.logged()
    assert agent.stop() == 0


def test_a_hang_up_while_the_agent_starts_is_not_forgotten(manager: Manager, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    with socket.create_server(("127.0.0.1", 0)) as peer:
        peer.settimeout(BOUND)
        address = f"tcp://127.0.0.1:{peer.getsockname()[1]}"
        config.write_text(f'{LISTEN}[[peers.static]]\nnode = "b"\naddress = "{address}"\n')
        process = subprocess.Popen(
            [*AGENT, "--config", str(config), "--socket", str(tmp_path / "agent.sock")],
            env={**os.environ, "NOTIFY_SOCKET": manager.name},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with process:
            try:
                dialled, _ = peer.accept()  # it is at its first round, and waits for our word
                with dialled:
                    process.send_signal(signal.SIGHUP)
                manager.until("READY=1")
                assert list(manager.until("RELOADING=1")) == ["RELOADING", "MONOTONIC_USEC"]
                manager.until("READY=1")
                process.send_signal(signal.SIGTERM)
                assert process.wait(BOUND) == 0
            finally:
                process.kill()


def test_the_mode_of_the_socket_follows_at_a_reload(start_agent: StartAgent, manager: Manager, tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("")
    path = tmp_path / "agent.sock"
    agent = start_agent("a", "--config", str(config), "--socket", str(path), NOTIFY_SOCKET=manager.name)
    manager.until("READY=1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    config.write_text('[access]\nusers = ["*"]\n')
    agent.process.send_signal(signal.SIGHUP)
    manager.until("RELOADING=1")
    manager.until("READY=1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666


def test_an_agent_that_the_watchdog_ends_says_where_it_was(start_agent: StartAgent, manager: Manager) -> None:
    agent = start_agent("a", NOTIFY_SOCKET=manager.name, WATCHDOG_USEC="30000000", PYTHONFAULTHANDLER="")
    agent.process.send_signal(signal.SIGABRT)
    assert agent.wait() == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in agent.logged()
    assert "in run_agent" in agent.logged()


@pytest.mark.parametrize("style", ["text", "json"])
def test_who_starts_an_agent_by_hand_is_told_in_the_format_of_the_log(
    manager: Manager, tmp_path: Path, style: str
) -> None:
    path = tmp_path / "agent.sock"
    environ = {"NOTIFY_SOCKET": manager.name, "ALLREDUCED_AGENT_LOG_FORMAT": style}
    with subprocess.Popen(
        [*AGENT, "--socket", str(path)],
        env={**os.environ, **environ, "ALLREDUCED_AGENT_LOG_LEVEL": "info"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            manager.until("READY=1")
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=BOUND)
        finally:
            process.kill()
    lines = said.decode().splitlines()
    told = f"allreduced: the agent is ready: clients at {path}, no other agents"
    if style == "text":
        assert lines.count(told) == 1
    else:
        events = [json.loads(line)["event"] for line in lines]
        assert events.count("ready") == events.count("stopping") == 1


@pytest.mark.parametrize("prefix", [CLOSED, FULL, UNREAD])
@pytest.mark.parametrize("style", ["text", "json"])
def test_an_agent_lives_without_a_standard_error(
    manager: Manager, tmp_path: Path, prefix: tuple[str, ...], style: str
) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(f'[agent]\nlog_level = "debug"\nlog_format = "{style}"\n')
    path = str(tmp_path / "agent.sock")
    environ = {**os.environ, "NOTIFY_SOCKET": manager.name, "WATCHDOG_USEC": "30000000", "PYTHONFAULTHANDLER": ""}
    command = [*prefix, *AGENT, "--config", str(config), "--socket", path]
    with subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL) as process:
        try:
            manager.until("READY=1")
            comm = connect(job="job", rank=0, size=1, local_rank=0, local_size=1, socket=path, deadline=BOUND)
            assert comm.all_reduce(np.ones(2), deadline=BOUND).tolist() == [1.0, 1.0]
            comm.close()
            config.write_text("[agent\n")
            process.send_signal(signal.SIGHUP)
            manager.until("RELOADING=1")
            assert "is no TOML" in manager.until("READY=1")["STATUS"]
            if prefix is CLOSED:
                assert str(Path(f"/proc/{process.pid}/fd/2").readlink()) == os.devnull  # no socket, no log of anybody's
            process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND) == 0
        finally:
            process.kill()


def test_clients_that_come_early_wait_at_the_socket_that_is_handed_over(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
        sock.listen()
        sock.set_inheritable(True)
        prefix = (sys.executable, "-c", HAND_OVER, str(sock.fileno()))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as early:
            early.settimeout(BOUND)
            early.connect(str(path))
            early.sendall(bytes.fromhex("08000000 95 01 01 01 cd1092 c3"))  # Hello, see docs/protocol.md
            agent = start_agent("a", prefix=prefix, pass_fds=(sock.fileno(),))
            assert agent.socket == str(path)
            assert early.recv(6)[5] == 65  # Welcome
        comm = connect(job="job", rank=0, size=1, local_rank=0, local_size=1, socket=str(path), deadline=BOUND)
        assert comm.all_reduce(np.ones(2), deadline=BOUND).tolist() == [1.0, 1.0]
        comm.close()
        assert agent.stop() == 0
        assert path.exists()


def test_a_second_agent_at_a_socket_disturbs_nobody(start_agent: StartAgent, tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    b = start_agent("b", "--listen", "tcp://127.0.0.1:0")
    first = start_agent("a", "--socket", str(path), "--listen", "tcp://127.0.0.1:0", "--peer", f"b={b.listen}")
    with pytest.raises(NotStarted) as caught:
        start_agent("a", "--socket", str(path), "--listen", "tcp://127.0.0.1:0", "--peer", f"b={b.listen}")
    assert isinstance(caught.value.error, ConfigError)
    assert f"an agent answers at {path} already" in caught.value.error.message
    assert b.logged() == first.logged() == ""  # it said nothing to others before it knew


def test_an_address_that_no_interface_has(start_agent: StartAgent) -> None:
    with pytest.raises(NotStarted) as caught:
        start_agent("a", "--listen", "tcp://192.0.2.1:0", ALLREDUCED_INSECURE="1")
    assert isinstance(caught.value.error, ConfigError)
    assert "192.0.2.1" in caught.value.error.message
    assert "this machine does not have that address" in caught.value.error.message


def test_an_interface_that_is_missing(start_agent: StartAgent) -> None:
    with pytest.raises(NotStarted) as caught:
        start_agent("a", "--listen", "tcp://[fe80::1%nosuch0]:0", ALLREDUCED_INSECURE="1")
    assert isinstance(caught.value.error, ConfigError)
    assert "nosuch0" in caught.value.error.message
