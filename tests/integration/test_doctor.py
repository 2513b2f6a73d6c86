"""`allreduced doctor` on real agents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.integration.agents import AgentProcess, StartAgent

LOOPBACK = ("--listen", "tcp://127.0.0.1:0")
BOUND = 100.0
"""Seconds in which a doctor must be through; it waits for ten at most, and starts slowly on a busy machine."""


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ALLREDUCED_")}
    return subprocess.run(
        [sys.executable, "-m", "allreduced.cli.main", "doctor", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )


def examined(*arguments: str) -> tuple[int, dict[str, str], Mapping[str, Mapping[str, object]]]:
    """Return the exit status, the worst level of each subject, and the ways by "source -> target"."""
    done = doctor("--json", *arguments)
    told = json.loads(done.stdout)
    order = ["ok", "note", "warning", "problem"]
    levels: dict[str, str] = {}
    for one in told["findings"]:
        levels[one["subject"]] = max(levels.get(one["subject"], "ok"), one["level"], key=order.index)
    ways = {f"{way['source']} -> {way['target']}": way for way in told["ways"]}
    return done.returncode, levels, ways


def two_agents(start_agent: StartAgent, **environment: str) -> tuple[AgentProcess, AgentProcess]:
    first = start_agent("a", *LOOPBACK, **environment)
    return first, start_agent("b", *LOOPBACK, "--join", first.listen.removeprefix("tcp://"), **environment)


def test_who_reaches_whom_is_told_both_ways_and_measured(start_agent: StartAgent) -> None:
    a, b = two_agents(start_agent)
    status, levels, ways = examined("--socket", a.socket, "--bandwidth")
    assert (levels["socket"], levels["release"], levels["peers"]) == ("ok", "ok", "ok"), levels
    assert status == (1 if "problem" in levels.values() else 0)
    assert sorted(ways) == ["a -> b", "b -> a"]
    assert [(way["linked"], way["outcome"], way["address"]) for _, way in sorted(ways.items())] == [
        (True, "reached", b.listen),
        (True, "reached", a.listen),
    ]
    assert all(isinstance(way["bandwidth"], int) and way["bandwidth"] > 0 for way in ways.values())
    assert a.stop() == 0
    assert b.stop() == 0
    assert "defect" not in a.logged() + b.logged()


def test_a_stopped_agent_is_silent_and_not_waited_for_long(start_agent: StartAgent) -> None:
    # It must still be held to live when it is asked, however slowly the command starts.
    a, b = two_agents(start_agent, ALLREDUCED_FAILURE_FAILURE_TIMEOUT="100")
    b.process.send_signal(signal.SIGSTOP)
    try:
        status, levels, ways = examined("--socket", a.socket)
    finally:
        b.process.send_signal(signal.SIGCONT)
    assert status == 1
    assert levels["agent b"] == "problem", levels
    assert "b -> a" not in ways


def test_listed_peers_are_dialled_and_refusals_told(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(
        f"""
[agent]
node = "a"
socket = "{tmp_path}/agent.sock"
[peers]
listen = "tcp://127.0.0.1:0"
[[peers.static]]
node = "b"
address = "tcp://127.0.0.1:1"
[[peers.static]]
node = "c"
address = "tcp://no-such-host.invalid:4123"
"""
    )
    done = doctor("--config", str(config))
    assert done.returncode == 1, done
    assert "problem peer b: tcp://127.0.0.1:1 refuses connections" in done.stdout
    assert "        mend: on b: systemctl start allreduced" in done.stdout
    assert "problem peer c: " in done.stdout
    assert f"note    socket: no agent runs at {tmp_path}/agent.sock" in done.stdout
    assert done.stderr == ""


def test_what_is_no_socket_is_told(tmp_path: Path) -> None:
    place = tmp_path / "agent.sock"
    place.write_text("something")
    status, levels, _ = examined("--socket", str(place))
    assert (status, levels["socket"]) == (1, "problem")


def test_broken_settings_end_it_with_one_error(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("[agent]\nnodes = 1\n")
    done = doctor("--config", str(config))
    assert (done.returncode, done.stdout) == (2, "")
    assert "nodes" in done.stderr
    assert len(done.stderr.splitlines()) <= 2
